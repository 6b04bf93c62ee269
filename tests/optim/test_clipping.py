"""Options ``max_norm`` and ``norm``: gradients clipped by this step's global norm, or in backward by the last one's."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.weights import SHAPES, same, through_file, values, weights
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fxprec
from fxprec.errors import ConfigError, GradientError
from fxprec.runtime.optim.applied import AppliedGradient
from fxprec.runtime.optim.clipping import norms_of

MOST = 0.7


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Norms below and above `MOST`, in turn and of one parameter alone."""
    g = torch.Generator().manual_seed(step)
    size = (0.01, 0.3, 0.02, 1.0)[step % 4]
    found = [torch.randn(shape, generator=g) * size for shape in SHAPES]
    found[step % 2] *= 5
    return [grad.to(dtype) for grad in found]


def train(opt: Any, first: int, steps: int, *, clip: bool = False) -> None:
    params = [p for group in opt.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        for p, grad in zip(params, gradients(step, params[0].dtype), strict=True):
            p.grad = grad
        if clip:
            nn.utils.clip_grad_norm_(params, MOST)
        opt.step()


@pytest.mark.parametrize("foreach", [None, False])
def test_an_exact_norm_clips_as_torch_does_bit_for_bit(foreach: bool | None) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    theirs = torch.optim.SGD(weights(), **options)  # type: ignore[arg-type]
    params = weights()
    groups = [{"params": params[:2]}, {"params": params[2:], "update": "nearest"}]
    ours = fxprec.optim.SGD(groups, update="nearest", max_norm=MOST, foreach=foreach, **options)  # type: ignore[arg-type]
    train(theirs, 0, 20, clip=True)
    train(ours, 0, 20)
    assert same(values(ours), values(theirs))


@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_an_exact_norm_clips_adamw_as_torch_clips_its_gradients(states: Any) -> None:
    """Beside clipped gradients of our own AdamW, which is torch's bit for bit (test_optim_torch.py)."""
    theirs, ours = (fxprec.optim.AdamW(weights(), lr=0.1, states=states, max_norm=most) for most in (None, MOST))
    train(theirs, 0, 12, clip=True)
    train(ours, 0, 12)
    assert same(values(ours), values(theirs))


def test_clipped_gradients_of_bf16_weights_are_bf16_where_the_paper_has_it_so() -> None:
    params, grads = weights(torch.bfloat16), gradients(3, torch.bfloat16)
    clipped = fxprec.optim.SGD(params, lr=2.0, update="nearest", max_norm=MOST)
    train(clipped, 3, 1)
    norm = clipped.last_norm()
    assert norm is not None
    factor = torch.clamp(MOST / (norm + 1e-6), max=1.0)
    plain = fxprec.optim.SGD(weights(torch.bfloat16), lr=2.0, update="nearest")
    for p, grad in zip(plain.param_groups[0]["params"], grads, strict=True):
        p.grad = grad.mul_(factor)
    plain.step()
    assert factor < 1
    assert same(values(clipped), values(plain))


def test_a_step_in_backward_takes_the_norm_in_the_order_of_the_parameters_memory() -> None:
    """Sums in another order have other bits, and autograd brings ``p.grad`` into that order."""
    for seed in range(5):
        grad = torch.randn(300, 200, generator=torch.Generator().manual_seed(seed))
        norms = []
        for in_backward in (True, False):
            param = nn.Parameter(torch.zeros(300, 200))
            opt = fxprec.optim.SGD([param], max_norm=MOST, norm="last")
            if in_backward:
                opt.step_one(param, grad.t().contiguous().t())
            else:
                param.grad = grad
            opt.step()
            norms.append(opt.last_norm())
        assert torch.equal(*norms)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", ["exact", "last"])
def test_each_way_is_what_its_formula_says(norm: Any, dtype: torch.dtype) -> None:
    """SGD with rate 1 in float64; of bf16 the clipped gradient and the weight are rounded, and norms are not."""
    params = weights(dtype)
    opt = fxprec.optim.SGD(params, lr=1.0, update="nearest", max_norm=MOST, norm=norm)
    last = 0.0
    for step in range(8):
        before, grads = values(opt), gradients(step, dtype)
        train(opt, step, 1)
        own = [float(g.double().norm()) for g in grads]
        whole = math.hypot(*own)
        found = opt.last_norm()
        assert found is not None
        assert abs(float(found) - whole) <= 1e-6 * whole
        for p, old, g, norm_of_it in zip(params, before, grads, own, strict=True):
            at = whole if norm == "exact" else max(last, norm_of_it)
            clipped = g.double() * min(1.0, MOST / (at + 1e-6))
            wanted = old.double() - clipped
            unit = 2.0**-22 if dtype == torch.float32 else 2.0**-8
            assert bool(((p.double() - wanted).abs() <= unit * (old.double().abs() + 2 * clipped.abs())).all())
            assert float(clipped.norm()) <= MOST * 1.000001
        last = whole


def test_no_gradient_moves_its_parameter_by_more_than_the_bound_in_any_step() -> None:
    """The first step has no last norm, and a sudden one is not foreseen: a gradient's own norm bounds it then."""
    params = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    opt = fxprec.optim.SGD(params, lr=1.0, update="nearest", max_norm=1.0, norm="last")
    for size in (1e4, 1e-3, 1e6):
        before = values(opt)
        for p in params:
            p.grad = torch.full((4,), size)
        opt.step()
        moved = [float((p.detach() - old).norm()) for p, old in zip(params, before, strict=True)]
        assert all(abs(move - 1.0) < 1e-4 for move in moved) if size > 1 else max(moved) < 1e-3


@pytest.mark.parametrize("norm", ["exact", "last"])
def test_training_resumes_bit_for_bit_from_a_file(norm: Any) -> None:
    def make(params: list[nn.Parameter]) -> Any:
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        return fxprec.optim.AdamW(groups, lr=0.1, max_norm=MOST, norm=norm, states="bf16")

    whole = make(weights())
    train(whole, 0, 4)  # the last of these has the largest norm
    state = through_file(whole.state_dict())
    resumed = make([nn.Parameter(p) for p in values(whole)])
    train(whole, 4, 3)
    resumed.load_state_dict(state)
    train(resumed, 4, 3)
    assert same(values(whole), values(resumed))


def test_torch_optim_takes_the_state_and_gives_it_back() -> None:
    ours = fxprec.optim.AdamW(weights(), max_norm=MOST, norm="last")
    train(ours, 0, 2)
    theirs = torch.optim.AdamW(weights())
    train(theirs, 0, 2)
    plain = theirs.state_dict()
    theirs.load_state_dict(ours.state_dict())
    train(theirs, 2, 1)
    ours.load_state_dict(plain)
    assert ours.param_groups[0]["max_norm"] == MOST
    train(ours, 2, 1)


def test_a_gradient_that_is_not_finite_reaches_all_weights_as_with_torch() -> None:
    for norm in ("exact", "last"):
        opt = fxprec.optim.SGD(weights(), lr=0.1, update="nearest", max_norm=MOST, norm=norm)  # type: ignore[arg-type]
        train(opt, 0, 1)
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.full_like(p, math.nan)
        opt.step()
        assert all(bool(p.isnan().all()) for p in values(opt))


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    turned=st.booleans(),
)
def test_a_norm_is_that_of_float64(shape: list[int], dtype: torch.dtype, turned: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    x = x.permute(tuple(reversed(range(x.dim())))) if turned else x
    (found,) = norms_of([x])
    assert found.dtype == torch.float32
    assert abs(float(found) - float(x.double().norm())) <= 1e-6 * float(x.double().norm())


@pytest.mark.parametrize("turned", [False, True])
def test_the_norm_of_a_large_bf16_gradient_copies_a_part_at_a_time(turned: bool) -> None:
    x = torch.randn(3000, 2000, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x.t() if turned else x
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        (found,) = norms_of([x])
    wanted = float(x.double().norm())
    assert abs(float(found) - wanted) <= 1e-5 * wanted  # torch's own norm of as many float32 is 1.4e-5 off
    taken = [e.nbytes() for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    assert max(taken) <= 1 << 18


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_norm": 0.0}, r"max_norm of group 0 is 0\.0, out of range; give it a number above 0"),
        ({"max_norm": math.inf}, "max_norm of group 0 is inf"),
        ({"max_norm": True}, "max_norm of group 0 is True"),
        ({"max_norm": "1"}, "max_norm of group 0 is '1'"),
        ({"max_norm": 1.0, "norm": "lst"}, r"unknown norm of group 0 'lst'; did you mean 'last'.*'exact', 'last'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fxprec.optim.SGD(weights(), **options)


def test_groups_that_are_clipped_in_different_ways_are_refused() -> None:
    a, b = weights()[:2]
    with pytest.raises(ConfigError, match=r"max_norm=2\.0 of group 1, and 1\.0 of group 0: .* norm of all groups"):
        fxprec.optim.SGD([{"params": [a]}, {"params": [b], "max_norm": 2.0}], max_norm=1.0)


# Inside of backward.


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))


def compiled(net: nn.Module, optimizer: Any, **options: Any) -> Any:
    given = {"recipe": "bf16", "lowering": "eager", "optimizer": optimizer, **options}
    return torch.compile(net, backend="fxprec", options=given)


def test_who_clips_a_gradient_that_is_not_held_is_told_of_both_ways() -> None:
    net = model()
    compiled(net, fxprec.optim.SGD(net.parameters(), lr=0.1))(torch.ones(2, 256)).sum().backward()
    words = r"gradient of 0\.weight is not held: .*give the optimizer max_norm= with norm='last'.*norm='exact'"
    for foreach in (None, False):
        with pytest.raises(GradientError, match=words) as told:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=foreach)
        assert "\n" not in str(told.value)
    with pytest.raises(GradientError, match=words):
        nn.utils.get_total_norm([p.grad for p in net.parameters()])  # type: ignore[misc]
    with pytest.raises(GradientError, match="do not read"):
        nn.utils.clip_grad_value_(net.parameters(), 1.0)


def test_an_exact_norm_holds_gradients_and_a_last_one_does_not() -> None:
    """No warning, under strict neither: holding them is the way that was asked for. An event says it."""
    gradient, found = 256 * 256 * 4, {}
    for norm in ("exact", "last"):
        torch._dynamo.reset()
        net = model()
        optimizer = fxprec.optim.SGD(net.parameters(), lr=0.1, max_norm=1.0, norm=norm)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run = compiled(net, optimizer, peak_budget="100%", strict=True)
            run(torch.ones(8, 256)).sum().backward()
        assert {isinstance(p.grad, AppliedGradient) for p in net.parameters()} == {norm == "last"}
        backend = fxprec.backend_of(run)
        said = [event.detail for event in backend.events if event.site == "optimizer"]
        assert [line.startswith("gradients are held until") for line in said] == [True] * (norm == "exact")
        (plan,) = backend.plans
        assert plan.peak_bytes is not None
        found[norm] = plan.peak_bytes.planned
    assert 8 * gradient < found["exact"]
    assert found["last"] < 2 * gradient


def test_an_exact_norm_that_comes_after_the_first_call_is_refused() -> None:
    net = model()
    optimizer = fxprec.optim.SGD(net.parameters(), lr=0.1)
    loss = compiled(net, optimizer)(torch.ones(2, 256)).sum()
    optimizer.param_groups[0]["max_norm"] = 1.0
    with pytest.raises(GradientError, match=r"norm='exact' was given to the optimizer after the model was compiled"):
        loss.backward()
    optimizer.param_groups[0]["norm"] = "last"
    compiled(net, optimizer)(torch.ones(2, 256)).sum().backward()
