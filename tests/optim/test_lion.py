"""`fxprec.optim.Lion` beside its algorithm in plain torch operations, and in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optim.weights import SHAPES, same, through_file, values, weights
from torch import Tensor, nn

import fxprec
from fxprec.errors import ConfigError, FxprecWarning

OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "betas": (0.95, 0.98)},
    {"maximize": True, "lr": torch.tensor(0.01)},
    {"weight_decay": 0.03, "foreach": False},
]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(step)
    return [(torch.randn(s, generator=g) * torch.rand(s, generator=g)).to(dtype) for s in SHAPES]


def train(opt: Any, first: int, steps: int) -> None:
    params = opt.param_groups[0]["params"]
    for step in range(first, first + steps):
        for p, grad in zip(params, gradients(step, params[0].dtype), strict=True):
            p.grad = grad
        opt.step()


def algorithm_2(steps: int, dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    """The paper's Algorithm 2 with torch's operations in place, in the order of the authors' own code."""
    lr, decay = options.get("lr", 0.01), options.get("weight_decay", 0.0)
    beta1, beta2 = options.get("betas", (0.9, 0.99))
    params = [p.detach().to(dtype) for p in weights()]
    means = [torch.zeros_like(p) for p in params]
    for step in range(steps):
        for p, mean, grad in zip(params, means, gradients(step), strict=True):
            grad = (-grad if options.get("maximize") else grad).to(dtype)
            p.mul_(1 - float(lr) * decay)
            p.add_(mean.mul(beta1).add_(grad, alpha=1 - beta1).sign_(), alpha=-float(lr))
            mean.mul_(beta2).add_(grad, alpha=1 - beta2)
    return params


@pytest.mark.parametrize("options", OPTIONS)
def test_lion_is_its_algorithm_bit_for_bit_over_100_steps(options: dict[str, Any]) -> None:
    opt = fxprec.optim.Lion(weights(), update="nearest", **({"lr": 0.01} | options))
    train(opt, 0, 100)
    wanted = algorithm_2(100, torch.float32, options)
    assert same(values(opt), wanted)
    exact = algorithm_2(100, torch.float64, options)
    off = torch.cat([(a - b).abs().flatten() for a, b in zip(wanted, exact, strict=True)])
    assert float(off.max()) < 100 * 2.0**-22, "100 roundings of numbers below 4; another sign is 0.02 off"


@pytest.mark.parametrize("held", [None, "float32", "bf16", "8bit", "4bit"])
@pytest.mark.parametrize("update", ["stochastic", "kahan"])
def test_the_kernel_and_the_reference_train_alike_and_resume(held: Any, update: Any) -> None:
    options = {"lr": 0.02, "weight_decay": 0.1, "update": update, "states": held}
    fast, slow = (fxprec.optim.Lion(weights(torch.bfloat16), foreach=f, **options) for f in (None, False))
    for opt in (fast, slow):
        train(opt, 0, 6)
    assert same(values(fast), values(slow))
    resumed = fxprec.optim.Lion([nn.Parameter(p) for p in values(fast)], update=update)
    resumed.load_state_dict(through_file(fast.state_dict()))
    for opt in (fast, resumed):
        train(opt, 6, 4)
    assert same(values(fast), values(resumed))


def test_averages_in_few_bits_move_nearly_all_weights_alike() -> None:
    """A sign differs where an average is near 0 alone. 4 bits have 7 sizes of means in a block of 64."""
    p = [nn.Parameter(torch.zeros(64, 64)) for _ in range(4)]
    opts = [fxprec.optim.Lion([q], lr=1.0, update="nearest", states=f) for q, f in zip(p, ("float32", "bf16", "8bit", "4bit"), strict=True)]  # type: ignore[arg-type]  # fmt: skip
    for step in range(50):
        grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step)) + 0.3
        for q, opt in zip(p, opts, strict=True):
            q.grad = grad.clone()
            opt.step()
    exact = p[0].detach()
    off = [float((q.detach() - exact).norm() / exact.norm()) for q in p[1:]]
    assert off[0] < 0.02
    assert off[1] < 0.06
    assert off[2] < 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_the_weight(bad: float) -> None:
    """A sign of NaN that is 0 would hide it."""
    p = nn.Parameter(torch.ones(3))
    opt = fxprec.optim.Lion([p], lr=0.1, update="nearest")
    for _ in range(2):
        p.grad = torch.tensor([1.0, bad, 0.0])
        opt.step()
    assert bool(p[1].isnan()) == math.isnan(bad)
    assert bool(opt.state[p]["exp_avg"][1].isfinite()) is False
    assert p.tolist()[::2] == pytest.approx([0.8, 1.0])


def test_a_rate_that_moves_nothing_is_told() -> None:
    p = nn.Parameter(torch.full((4,), 100.0).bfloat16())
    opt = fxprec.optim.Lion([p], lr=0.01, update="nearest")
    p.grad = torch.ones_like(p)
    with pytest.warns(FxprecWarning, match=r"lr=0\.01 can never move the largest weight of group 0: 100\.0"):
        opt.step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, r"lr is -1\.0 and weight_decay 0; give both 0 or more"),
        ({"weight_decay": -0.5}, r"weight_decay -0\.5; give both"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0\.9, 1\.0\); give two numbers from 0 to below 1"),
        ({"update": "kahn"}, "did you mean 'kahan'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fxprec.optim.Lion(weights(), **options)


def test_a_step_budget_chooses_the_form_of_its_average() -> None:
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    weight = 512 * 512 * 4
    opt = fxprec.optim.Lion(net.parameters(), states="auto")
    options = {"recipe": "bf16", "lowering": "eager", "optimizer": opt, "step_budget": 15 * weight}
    torch.compile(net, backend="fxprec", options=options)(torch.ones(8, 512)).sum().backward()
    assert opt.param_groups[0]["states"] == "bf16", "8 of weights, 8 of float32 states: with bf16 3 are left"
