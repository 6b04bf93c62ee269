"""At float32 with ``update="nearest"``: torch.optim, bit for bit; and everything else its users rely on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim.weights import through_file
from torch import Tensor

import fxprec
from fxprec.errors import ConfigError
from fxprec.runtime.optim.fma import sqrt

SGD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.1, "maximize": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
    {"weight_decay": 1e-2, "lr": torch.tensor(0.02)},
]
ADAMW_OPTIONS: list[dict[str, Any]] = [
    {},
    {"amsgrad": True, "weight_decay": 0.1},
    {"weight_decay": 0, "maximize": True, "eps": 1e-3},
    {"betas": (0.3, 0.99), "lr": torch.tensor(1e-2)},
    {"foreach": False, "fused": True},
]
SHAPES = ((64, 33), (7,), (0,), (3, 5, 2))


def train(make: Any, steps: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[list[Tensor], Any]:
    """Weights after ``steps`` with gradients that are the same for every optimizer; and the optimizer."""
    g = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in SHAPES]
    opt = make(params)
    for _ in range(steps):
        for p in params:
            p.grad = (torch.randn(p.shape, generator=g) * torch.rand(p.shape, generator=g)).to(dtype)
        opt.step()
    return [p.detach() for p in params], opt


@pytest.mark.parametrize("options", SGD_OPTIONS)
def test_sgd_is_torchs_bit_for_bit_over_100_steps(options: dict[str, Any]) -> None:
    options = {"lr": 0.013} | options
    wanted, theirs = train(lambda p: torch.optim.SGD(p, **options), 100)
    found, ours = train(lambda p: fxprec.optim.SGD(p, update="nearest", **options), 100)
    assert all(map(torch.equal, found, wanted))
    for key, state in theirs.state_dict()["state"].items():
        assert all(torch.equal(ours.state_dict()["state"][key][name], t) for name, t in state.items() if t is not None)


@pytest.mark.parametrize("options", ADAMW_OPTIONS)
def test_adamw_is_torchs_bit_for_bit_over_100_steps(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own square root is off by a unit for 19 % of its arguments (MKL); here it is rounded once."""
    options = {"lr": 0.013} | options
    plain, _ = train(lambda p: torch.optim.AdamW(p, **{"foreach": None} | options | {"fused": None}), 100)
    monkeypatch.setattr(torch.Tensor, "sqrt", sqrt)
    wanted, _ = train(lambda p: torch.optim.AdamW(p, **{"foreach": None} | options | {"fused": None}), 100)
    found, _ = train(lambda p: fxprec.optim.AdamW(p, update="nearest", **options), 100)
    assert all(map(torch.equal, found, wanted))
    # With torch's square root: one unit in the last place of the largest weights.
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.numel() == 0 or (ours - theirs).abs().max() <= 2.0**-22 * theirs.abs().max()


@pytest.mark.parametrize("update", ["stochastic", "kahan", "stochastic+kahan"])
def test_the_kernel_and_the_reference_train_alike(update: Any) -> None:
    make = {"update": update, "format": "bf16", "betas": (0.9, 0.99), "count_cancelled": True}
    fast, a = train(lambda p: fxprec.optim.AdamW(p, **make), 20, torch.bfloat16)
    slow, b = train(lambda p: fxprec.optim.AdamW(p, foreach=False, **make), 20, torch.bfloat16)
    assert all(map(torch.equal, fast, slow))
    assert a.cancelled() == b.cancelled()


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_state_goes_to_torch_optim_and_back(name: str) -> None:
    options = {"lr": 0.01} | ({"momentum": 0.9} if name == "SGD" else {})
    make = getattr(torch.optim, name), getattr(fxprec.optim, name)
    _, theirs = train(lambda p: make[0](p, **options), 3)
    _, ours = train(lambda p: make[1](p, update="kahan", count_cancelled=True, **options), 3)
    saved = theirs.state_dict()
    ours.load_state_dict(saved)
    assert ours.param_groups[0]["update"] == "kahan"  # what torch's state does not name stays
    for key, state in saved["state"].items():
        for field, value in state.items():
            assert torch.equal(torch.as_tensor(ours.state_dict()["state"][key][field]), torch.as_tensor(value))
    ours.step()  # the compensation starts at zero
    assert float(ours.state_dict()["state"][0]["step"]) == (4 if name == "AdamW" else 2)
    theirs.load_state_dict(ours.state_dict())
    theirs.step()


def test_training_resumes_bit_for_bit_from_a_saved_file() -> None:
    def make(params: Any) -> Any:
        return fxprec.optim.AdamW(params, betas=(0.9, 0.99), update="stochastic+kahan", seed=5)

    whole, _ = train(make, 8, torch.bfloat16)
    half, first = train(make, 4, torch.bfloat16)
    state = through_file(first.state_dict())

    g = torch.Generator().manual_seed(0)
    for shape in SHAPES:  # what the first half drew
        torch.randn(shape, generator=g)
    for _ in range(4):
        for shape in SHAPES:
            torch.randn(shape, generator=g), torch.rand(shape, generator=g)
    params = [torch.nn.Parameter(p.clone()) for p in half]
    second = fxprec.optim.AdamW(params, betas=(0.9, 0.99), update="stochastic+kahan")
    second.load_state_dict(state)
    assert second.param_groups[0]["seed"] == 5
    for _ in range(4):
        for p in params:
            p.grad = (torch.randn(p.shape, generator=g) * torch.rand(p.shape, generator=g)).bfloat16()
        second.step()
    assert all(map(torch.equal, [p.detach() for p in params], whole))


def test_closures_schedulers_and_groups() -> None:
    a, b = (torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    opt = fxprec.optim.SGD([{"params": [a], "update": "kahan"}, {"params": [b], "lr": 0.25}], lr=0.5)
    assert [g["update"] for g in opt.param_groups] == ["kahan", "stochastic"]
    schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = (a + b).float().sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 8.0
    assert a.tolist() == [0.5] * 4
    assert b.tolist() == [0.75] * 4
    schedule.step()
    opt.step(closure)
    assert a.tolist() == [0.25] * 4
    assert "compensation" in opt.state[a]
    assert "compensation" not in opt.state[b]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
@pytest.mark.parametrize("make", [fxprec.optim.SGD, fxprec.optim.AdamW, fxprec.optim.Lion, fxprec.optim.Muon])
def test_a_copied_optimizer_takes_further_groups(make: Any, copied: Callable[[Any], Any]) -> None:
    opt = copied(make([torch.nn.Parameter(torch.ones(2, 2))], lr=0.5, update="kahan", foreach=False))
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 3))]})
    assert [(g["lr"], g["update"], g["foreach"]) for g in opt.param_groups] == [(0.5, "kahan", False)] * 2


def test_muon_keeps_what_torchs_state_does_not_name() -> None:
    params = [torch.nn.Parameter(torch.ones(2, 2))]
    ours = fxprec.optim.Muon(params, foreach=False)
    ours.load_state_dict(torch.optim.Muon(params).state_dict())
    assert ours.param_groups[0]["foreach"] is False


@pytest.mark.parametrize("group", [{"update": "nearset"}, {"states": "int9"}, {"max_norm": -1.0}])
def test_a_state_that_is_refused_leaves_the_optimizer_as_it_was(group: dict[str, Any]) -> None:
    param = torch.nn.Parameter(torch.ones(4))
    ours = fxprec.optim.AdamW([param], lr=0.5)
    param.grad = torch.ones(4)
    ours.step()
    before = copy.deepcopy(ours.state_dict())
    refused = copy.deepcopy(before)
    refused["param_groups"][0] |= {"lr": 0.25, **group}
    refused["state"][0]["exp_avg"] += 1
    with pytest.raises(ConfigError, match=next(iter(group))):
        ours.load_state_dict(refused)
    after = ours.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(map(torch.equal, after["state"][0].values(), before["state"][0].values()))
    ours.step()


def test_parameters_without_gradient_frozen_empty_or_of_any_layout() -> None:
    dense = torch.randn(2, 3, 4, 5)
    weights = [
        dense.clone(),
        dense.clone().to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 10)[..., ::2].copy_(dense),
        torch.empty(0, 3),
        torch.tensor(1.5),
        torch.ones(3),
    ]
    params = [torch.nn.Parameter(w) for w in weights]
    params.append(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    opt = fxprec.optim.AdamW(params, lr=0.1, update="kahan", format="bf16", betas=(0.9, 0.99))
    grad = torch.randn(2, 3, 4, 5)
    for p in params[:3]:
        p.grad = grad.clone()
    params[1].grad = grad.clone()  # contiguous, for a channels-last weight
    params[3].grad, params[4].grad = torch.zeros(0, 3), torch.tensor(1.0)
    for _ in range(3):
        opt.step()
    assert not torch.equal(params[0].detach(), dense)
    assert torch.equal(params[0], params[1])
    assert torch.equal(params[0], params[2])
    assert params[1].is_contiguous(memory_format=torch.channels_last)
    assert float(params[4].detach()) < 1.5
    assert params[5] not in opt.state  # no gradient, no state, no change
    assert params[6].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("foreach", [None, False])
def test_a_weight_that_becomes_channels_last_keeps_the_order_of_its_state(foreach: bool | None) -> None:
    """By `model.to(memory_format=...)` after some steps, or by a state that a contiguous weight has saved."""
    start, grads = torch.randn(4, 3, 3, 3).bfloat16(), torch.randn(4, 4, 3, 3, 3).bfloat16()

    def run(order: torch.memory_format) -> list[torch.Tensor]:
        p = torch.nn.Parameter(start.clone())
        opt = fxprec.optim.AdamW([p], lr=0.1, betas=(0.9, 0.99), update="kahan", foreach=foreach)
        for step, grad in enumerate(grads):
            p.data = p.data.to(memory_format=order) if step == 2 else p.data
            p.grad = grad.clone()
            opt.step()
        return [p.detach(), *(opt.state[p][name] for name in ("exp_avg", "exp_avg_sq", "compensation"))]

    assert all(map(torch.equal, run(torch.contiguous_format), run(torch.channels_last)))


def test_a_step_is_seen_by_autograd() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    opt = fxprec.optim.SGD([p], lr=0.5)
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
