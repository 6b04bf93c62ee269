"""APS under DistributedDataParallel: replicas after many steps, parameters that are odd, layers kept high."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from aps_ranks import run_ranks, several
from models import Parts
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fxprec.aps import APSState, aps_hook

WORLD = 3
STEPS = [60, pytest.param(200, marks=pytest.mark.full)]
MODES: dict[str, dict[str, Any]] = {
    "fp32 sums": {},
    "format": {"format": "1-5-2", "accumulate": "format"},
    "hierarchical": {"format": "1-4-3", "accumulate": "format", "group_size": 2},  # the last group is short
    "kahan": {"accumulate": "kahan"},
    "stochastic": {"rounding": "stochastic"},
    "stochastic hierarchical": {"rounding": "stochastic", "accumulate": "kahan", "group_size": 2},
    "error feedback": {"format": "1-3-0", "error_feedback": True},
    "codec": {"format": "dynamic-tree"},
    "4 bits": {"format": "1-2-1/256:e8m0", "error_feedback": True},
    "16 bits": {"format": "1-6-9", "high_steps": 50},
    "kept high": {"format": "1-2-1", "keep_high": ["3"]},
    "no scale": {"format": "1-4-3", "scaling": "none"},
}


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))


def train(rank: int, steps: int, options: dict[str, Any], **ddp_options: Any) -> Tensor:
    """Return all parameters, flat, after some steps of SGD under the hook."""
    model = small_model()
    ddp = DistributedDataParallel(model, **ddp_options)
    ddp.register_comm_hook(APSState(model=ddp, **options), aps_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(7 + rank)
    for _ in range(steps):
        x = torch.randn(6, 12, generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def replicas(rank: int, world: int, steps: int) -> dict[str, Tensor]:
    found = {name: train(rank, steps, options) for name, options in MODES.items()}
    return {**found, "views": train(rank, steps, {}, gradient_as_bucket_view=True)}


def partly_used() -> nn.Module:
    """One layer that takes no part in the forward pass, and parameters of one and of no element."""
    torch.manual_seed(0)
    layers = {"used": nn.Linear(12, 5), "unused": nn.Linear(12, 5)}
    layers |= {"one": nn.Parameter(torch.ones(())), "none": nn.Parameter(torch.empty(0))}
    return Parts(lambda m, x: m.used(x) * m.one + m.none.sum(), **layers)


def inputs(world: int) -> list[Tensor]:
    return [torch.randn(8, 12, generator=torch.Generator().manual_seed(r)) for r in range(world)]


def odd_parameters(rank: int, world: int) -> dict[str, Any]:
    model, wanted = partly_used(), partly_used()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(APSState("bf16"), aps_hook)
    ddp(inputs(world)[rank]).square().sum().backward()
    (sum(wanted(x).square().sum() for x in inputs(world)) / world).backward()
    error = (model.used.weight.grad - wanted.used.weight.grad).norm() / wanted.used.weight.grad.norm()
    return {
        "unused": model.unused.weight.grad is None or bool((model.unused.weight.grad == 0).all()),
        "error": float(error),
        "one": float(model.one.grad / wanted.one.grad),
        "none": tuple(model.none.grad.shape),
    }


def kept_high(rank: int, world: int) -> list[float]:
    """By parameter, the relative difference of its gradient to plain DDP's, where the last layer is kept high."""

    def grads(hook: bool) -> list[Tensor]:
        model = small_model()
        ddp = DistributedDataParallel(model)
        if hook:
            ddp.register_comm_hook(APSState(keep_high=["3"], model=ddp), aps_hook)
        ddp(inputs(world)[rank]).square().mean().backward()
        return [p.grad for p in model.parameters()]

    return [float((a - b).norm() / b.norm()) for a, b in zip(grads(True), grads(False), strict=True)]


def accumulated(rank: int, world: int) -> tuple[float, int]:
    """Relative error of the gradient of two batches, the first under no_sync, and how many steps the state counted."""
    model, wanted = small_model().eval(), small_model().eval()
    ddp = DistributedDataParallel(model)
    state = APSState("bf16")
    ddp.register_comm_hook(state, aps_hook)
    x = inputs(world)[rank]
    with ddp.no_sync():
        ddp(x).square().mean().backward()
    ddp(x + 1).square().mean().backward()
    (sum(wanted(x).square().mean() + wanted(x + 1).square().mean() for x in inputs(world)) / world).backward()
    found, plain = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, wanted))
    return float((found - plain).norm() / plain.norm()), state.step


def complex_model() -> nn.Module:
    torch.manual_seed(0)
    layers = {"low": nn.Linear(12, 5), "high": nn.Linear(12, 5)}
    layers |= {"complex": nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))}
    return Parts(lambda m, x: torch.complex(m.low(x), m.high(x)) @ m.complex, **layers)


def complex_parameters(rank: int, world: int) -> dict[str, float]:
    """By parameter, the relative difference of its gradient to plain DDP's, in codes and partly in its own dtype."""

    def grads(**options: Any) -> dict[str, Tensor]:
        model = complex_model()
        ddp = DistributedDataParallel(model)
        if options:
            ddp.register_comm_hook(APSState(model=ddp, **options), aps_hook)
        for _ in range(2):  # DDP builds its buckets anew after the first
            ddp.zero_grad()
            ddp(inputs(world)[rank]).abs().square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    wanted, found = grads(), {}
    for options in ({"format": "bf16"}, {"format": "1-4-3/32:bf16", "error_feedback": True}, {"high_steps": 9}):
        for name, g in grads(**options).items():
            found[f"{name} {options}"] = float((g - wanted[name]).norm() / wanted[name].norm())
    return found


class Noted(APSState):
    """A state that notes which threads set its step."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":
            self.__dict__.setdefault("threads", []).append(threading.current_thread() is threading.main_thread())
        super().__setattr__(name, value)


def counted(rank: int, world: int) -> list[bool]:
    """Whether the main thread set the step, each time after the state was made; the last bucket has no codes."""
    model = small_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    state = Noted(keep_high=["0"], model=ddp)
    ddp.register_comm_hook(state, aps_hook)
    for _ in range(3):
        ddp(inputs(world)[rank]).sum().backward()
    return state.threads[1:]


@pytest.fixture(scope="module", params=STEPS)
def trained(once: Callable[..., Any], request: pytest.FixtureRequest) -> list[dict[str, Tensor]]:
    return once(f"ddp-{request.param}", lambda: run_ranks(WORLD, replicas, request.param))


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    checks = [(check, ()) for check in (odd_parameters, kept_high, accumulated, complex_parameters, counted)]
    return once("ddp", lambda: run_ranks(WORLD, several, checks))


def test_replicas_are_bit_identical_after_many_steps_in_every_mode(trained: list[dict[str, Tensor]]) -> None:
    first, *others = trained
    for mode, parameters in first.items():
        assert 0.1 < parameters.abs().max() < 10, mode
        assert all(torch.equal(parameters, other[mode]) for other in others), mode


def test_every_mode_trains_differently_and_bucket_views_change_nothing(trained: list[dict[str, Tensor]]) -> None:
    finals = {mode: tuple(parameters.tolist()) for mode, parameters in trained[0].items()}
    assert finals.pop("views") == finals["fp32 sums"]
    assert len(set(finals.values())) == len(MODES)


def test_unused_parameters_and_parameters_of_no_or_one_element(results: list[dict[str, Any]]) -> None:
    for found in (r["odd_parameters"] for r in results):
        assert found["unused"]
        assert found["error"] < 2**-8
        assert found["one"] == pytest.approx(1, abs=2**-8)
        assert found["none"] == (0,)


def test_the_layer_kept_high_equals_plain_ddp_and_the_others_do_not(results: list[dict[str, Any]]) -> None:
    for differences in (r["kept_high"] for r in results):
        assert max(differences[-2:]) < 1e-6  # three ranks are added in another order
        assert differences[0] > 1e-3


def test_gradients_accumulated_without_synchronising_go_once(results: list[dict[str, Any]]) -> None:
    for error, steps in (r["accumulated"] for r in results):
        assert 0 < error < 2**-8
        assert steps == 1


def test_all_of_a_complex_gradient_is_averaged(results: list[dict[str, Any]]) -> None:
    for name, error in results[0]["complex_parameters"].items():
        assert error < (1e-6 if "high_steps" in name else 2**-7 if "bf16'}" in name else 2**-3), name
    assert all(r["complex_parameters"] == results[0]["complex_parameters"] for r in results)


def test_steps_are_counted_by_the_thread_that_reads_the_count(results: list[dict[str, Any]]) -> None:
    """A worker that adds to the count while a later bucket does would lose a step, and ranks would differ."""
    assert all(all(r["counted"]) and len(r["counted"]) >= 3 for r in results)
