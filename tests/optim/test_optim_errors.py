"""Bad input: each case of docs/optim.md, "What is refused", and its words."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fxprec
from fxprec.optim import SGD, AdamW


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape or (3,), dtype=dtype), requires_grad=dtype.is_floating_point)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AdamW([weight(dtype=torch.bfloat16)]), r"betas\[1\]=0.999 of group 0 rounds to 1 in bf16: .* 0.998"),
        (lambda: AdamW([weight()], betas=(0.99, 0.9), format="1-8-3:ieee"), r"betas\[0\]=0.99 .* less than 0.96875"),
        (lambda: SGD([weight()], momentum=0.999, format="bf16"), "momentum=0.999 of group 0 rounds to 1"),
        (lambda: SGD([weight(), weight(dtype=torch.bfloat16)]), "mixes formats: parameter 0 is fp32, parameter 1 is bf16"),
        (lambda: SGD([weight(dtype=torch.complex64)]), "parameter 0 of group 0 is complex64; give torch.view_as_real"),
        (lambda: SGD([weight(dtype=torch.int32)]), "is int32; only floating-point weights are trained"),
        (lambda: SGD([weight(dtype=torch.float64)]), "is float64; steps are computed in float32"),
        (lambda: SGD([weight(dtype=torch.float16)], format="bf16"), "fp16, which cannot hold every number of bf16"),
        (lambda: SGD([weight()], update="kahn"), "unknown update of group 0 'kahn'; did you mean 'kahan'"),
        (lambda: SGD([weight()], format="bf61"), "unknown format 'bf61'; did you mean 'bf16'"),
        (lambda: SGD([weight()], seed=1, generator=torch.Generator()), "seed and generator are both given"),
        (lambda: SGD([weight()], seed=1.5), "seed is 1.5; give it an int"),
        (lambda: SGD([weight()], differentiable=True), "rounding has no derivative"),
        (lambda: AdamW([weight()], capturable=True, error_if_nonfinite=True), "capturable=True forbids"),
        (lambda: SGD([weight()], lr=-1.0), "Invalid learning rate"),
        (lambda: SGD([weight()], nesterov=True), "Nesterov momentum requires a momentum"),
    ],
)  # fmt: skip
def test_what_is_refused_and_what_it_says(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_refused_group_is_not_added() -> None:
    opt = SGD([weight()])
    with pytest.raises(fxprec.ConfigError, match="of group 1 is int64"):
        opt.add_param_group({"params": [weight(dtype=torch.int64)]})
    assert len(opt.param_groups) == 1


def test_names_of_parameters_are_in_the_messages() -> None:
    with pytest.raises(fxprec.ConfigError, match=r"parameter 'head.scale' of group 0 is int8"):
        SGD([("head.scale", weight(dtype=torch.int8))])


def test_groups_of_one_format_each_may_differ() -> None:
    SGD([{"params": [weight()]}, {"params": [weight(dtype=torch.bfloat16)]}])
    SGD([weight(), weight(dtype=torch.bfloat16)], format="bf16")


def test_sparse_gradients_are_refused() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    opt = SGD(table.parameters(), lr=0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(fxprec.ConfigError, match="the gradient of parameter 0 of group 0 is sparse"):
        opt.step()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_gradients_raise_before_anything_changes(bad: float) -> None:
    params = [weight(dtype=torch.bfloat16), weight(dtype=torch.bfloat16)]
    opt = AdamW(params, lr=0.1, betas=(0.9, 0.99), update="kahan", error_if_nonfinite=True)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    before = [p.detach().clone() for p in params] + [t.clone() for t in opt.state[params[0]].values()]
    params[1].grad = torch.tensor([1.0, bad, 1.0], dtype=torch.bfloat16)
    with pytest.raises(fxprec.GradientError, match="parameter 1 of group 0 has inf or NaN; weights and state are as"):
        opt.step()
    after = [p.detach() for p in params] + list(opt.state[params[0]].values())
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("fmt", ["bf16", "1-5-2"])
@pytest.mark.parametrize("update", ["nearest", "stochastic", "kahan"])
def test_nan_gradients_stay_visible(update: Any, fmt: str) -> None:
    """Also in formats without a NaN: their carrier has one."""
    p = weight()
    opt = SGD([p], lr=0.5, momentum=0.5, format=fmt, update=update)
    p.grad = torch.tensor([1.0, torch.nan, 1.0])
    opt.step()
    assert p.isnan().tolist() == [False, True, False]


def test_a_learning_rate_that_moves_nothing_warns_once_and_names_the_largest_weight() -> None:
    p, q = weight(dtype=torch.bfloat16), torch.nn.Parameter(torch.tensor([0.5, -40.0], dtype=torch.bfloat16))
    opt = AdamW([p, q], lr=0.1, betas=(0.9, 0.99), weight_decay=0, update="nearest")
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    words = "lr=0.1 can never move the largest weight of group 0: 40.0 in parameter 1; updates of at most 0.1 "
    with pytest.warns(fxprec.FxprecWarning, match=words):
        opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
        for update, lr in (("nearest", 0.3), ("kahan", 0.1), ("stochastic", 0.1)):
            AdamW([q], lr=lr, betas=(0.9, 0.99), weight_decay=0, update=update).step()  # type: ignore[arg-type]


def test_a_warm_up_that_starts_low_does_not_warn() -> None:
    p = weight(dtype=torch.bfloat16)
    opt = SGD([p], lr=0.5, update="nearest")
    torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1e-6 * (step + 1))
    p.grad = torch.ones_like(p)
    opt.step()
    assert p.tolist() == [1.0] * 3
