"""One backend over several equal layers or models: one capture, and a plan, scales and statistics for each."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from backend_helpers import assert_close, eager_backend
from helpers import as_counts
from models import TanhLayer
from torch import Tensor, nn

import fxprec
from fxprec.driver import capture

OPTIONS: dict[str, Any] = {"low_ratio": 1.0}


def batch() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def step(net: nn.Module) -> list[Tensor]:
    """Return the loss and every gradient of one step."""
    net.zero_grad()
    loss = net(batch()).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters())]


def compiled_layers(backend: fxprec.Backend, net: nn.Module | None = None) -> nn.Module:
    net = net or nn.Sequential(*(TanhLayer() for _ in range(3)))
    for part in net:
        part.compile(backend=backend)
    return net


def promote_in(backend: fxprec.Backend, net: nn.Module, layer: int) -> None:
    """Let statistics arrive at one layer that promote a tensor of it, and take the next step."""
    step(net)
    controller = backend.controllers[layer]
    site = next(s for s in controller.plan.sites if s.direction == "forward" and s.format != controller.rules.hi)
    controller.queue.push([site.id], torch.tensor(as_counts(1.0, 0.0, 1.0), dtype=torch.float64))
    step(net)


def promoted(plans: Iterable[fxprec.Plan | None]) -> list[int]:
    return [len(plan.promoted) for plan in plans if plan is not None]


@pytest.mark.parametrize("storage", ["simulate", "packed"])
def test_layers_of_one_backend_share_a_capture_and_train_each_by_its_own_plan(storage: str) -> None:
    backend = eager_backend(storage, **OPTIONS)
    net = nn.Sequential(*(TanhLayer() for _ in range(3)))
    reference = copy.deepcopy(net)
    compiled_layers(backend, net)
    counts = torch._dynamo.utils.counters["stats"]
    counts.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for found, wanted in zip(step(net), step(reference), strict=True):
                assert_close(found, wanted, "loss, then gradients")
    assert counts["unique_graphs"] == 1
    assert len(backend.plans) == 3
    assert [controller.step for controller in backend.controllers] == [2, 2, 2]
    assert len({id(controller.queue) for controller in backend.controllers}) == 3


@pytest.mark.parametrize("storage", ["simulate", "packed"])
def test_an_overflow_in_one_layer_promotes_in_that_layer_alone(storage: str) -> None:
    backend = eager_backend(storage, recipe="hfp8", **OPTIONS)
    net = compiled_layers(backend)
    promote_in(backend, net, 1)
    assert promoted(backend.plans) == [0, 1, 0]
    with torch.no_grad():
        net(batch().detach())
    evaluation = [0, 1, 0] if storage == "simulate" else [0, 0, 0]  # packed, only backward reads what is stored
    assert promoted(backend.all_plans) == [0, 1, 0, *evaluation]


def test_statistics_are_those_of_each_layer() -> None:
    backend = eager_backend("simulate", recipe="hfp8", promote_above=None, **OPTIONS)
    net = compiled_layers(backend)
    with torch.no_grad():
        net[1].linear.weight.mul_(1e6)
    step(net)
    overflows = {row["graph"] for row in backend.stats() if row["overflow_ratio"]}
    assert overflows == {1}


def test_each_layer_takes_its_own_state_again() -> None:
    backend = eager_backend("packed", recipe="hfp8", **OPTIONS)
    net = compiled_layers(backend)
    promote_in(backend, net, 1)
    resumed = eager_backend("packed", recipe="hfp8", **OPTIONS)
    resumed.load_state_dict(backend.state_dict())
    again = compiled_layers(resumed, copy.deepcopy(net))
    for found, wanted in zip(step(again), step(net), strict=True):
        assert torch.equal(found, wanted)
    assert promoted(resumed.plans) == [0, 1, 0]
    torch.compiler.reset()
    step(again)
    assert promoted(resumed.plans) == [0, 1, 0]


def test_two_models_in_turn_have_plans_of_their_own() -> None:
    backend = eager_backend("simulate", strict=True, **OPTIONS)
    first, second = (torch.compile(TanhLayer(), backend=backend) for _ in range(2))
    for model in (first, second, second):
        step(model)
    assert [controller.step for controller in backend.controllers] == [1, 2]


def test_new_parameters_of_the_same_model_are_no_other_layer() -> None:
    backend = eager_backend("simulate", **OPTIONS)
    net = compiled_layers(backend)
    step(net)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(state, assign=True)
    step(net)
    assert [controller.step for controller in backend.controllers] == [2, 2, 2]


def test_a_step_compares_no_layers_that_were_compared_before(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = eager_backend("simulate", **OPTIONS)
    net = compiled_layers(backend)

    def train_and_evaluate() -> None:
        step(net)
        with torch.no_grad():
            net(batch().detach())

    train_and_evaluate()
    train_and_evaluate()
    compared: list[object] = []
    monkeypatch.setattr(capture.Parameters, "of_another", lambda mine, theirs: compared.append(mine))
    train_and_evaluate()
    assert not compared


def test_graphs_that_new_parameters_take_over_follow_their_new_layer() -> None:
    backend = eager_backend("simulate", recipe="hfp8", **OPTIONS)
    net = compiled_layers(backend, nn.Sequential(TanhLayer(), TanhLayer()))
    step(net)
    with torch.no_grad():
        net(batch().detach())
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
    with torch.no_grad():  # the second layer comes first, and takes the graph that was the first one's
        net[1](batch().detach())
        net[0](batch().detach())
    promote_in(backend, net, 1)
    with torch.no_grad():
        net(batch().detach())
    assert promoted(backend.all_plans) == [0, 1, 1, 0]
