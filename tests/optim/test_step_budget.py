"""Option ``step_budget``: weights, the optimizer's states and the step's peak within one number of bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fxprec
from fxprec.driver.step_budget import StepBudget
from fxprec.errors import BudgetError, ConfigError
from fxprec.passes.analysis.inputs import GraphInput

WIDTH, LAYERS = 512, 8
WEIGHT = WIDTH * WIDTH * 4


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def stepped(model: nn.Module, optimizer: object, budget: object, **options: Any) -> Any:
    given = {"recipe": "bf16", "lowering": "eager", "optimizer": optimizer, "step_budget": budget, **options}
    run = torch.compile(model, backend="fxprec", options=given)
    run(torch.ones(8, WIDTH)).sum().backward()
    return run


@pytest.mark.parametrize("states", [None, "float32", "bf16", "8bit"])
@pytest.mark.parametrize("update", ["stochastic", "stochastic+kahan"])
def test_states_take_what_is_said_before_there_are_any(states: str | None, update: Any) -> None:
    model = nn.Sequential(nn.Linear(70, 30), nn.LayerNorm(30), nn.Linear(30, 1)).bfloat16()
    optimizer = fxprec.optim.AdamW(model.parameters(), betas=(0.9, 0.95), update=update, states=states)
    said = optimizer.state_bytes()
    model(torch.randn(4, 70, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    held = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    assert said == sum(t.nbytes for t in held if isinstance(t, Tensor))


def test_the_rest_of_the_budget_bounds_the_peak() -> None:
    model = layers()
    model.register_buffer("table", torch.zeros(1 << 18))  # read by nobody: it is no input of the graph
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=1e-3)
    run = stepped(model, optimizer, 27 * WEIGHT)  # weights 8, states 16
    (plan,) = fxprec.backend_of(run).plans
    assert plan.peak_bytes is not None
    assert plan.peak_bytes.budget == 3 * WEIGHT
    assert plan.peak_bytes.planned <= 3 * WEIGHT
    (event,) = (event for event in fxprec.backend_of(run).events if event.kind == "memory")
    assert event.detail.startswith("step_budget is 27.00 MiB")
    assert "weights take 8.00 MiB" in event.detail
    assert "optimizer states 16.00 MiB" in event.detail


def test_frozen_parameters_count_too() -> None:
    model = layers()
    model[0].requires_grad_(False)
    optimizer = fxprec.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    (plan,) = fxprec.backend_of(stepped(model, optimizer, 27 * WEIGHT)).plans
    assert plan.peak_bytes is not None
    assert plan.peak_bytes.budget == (27 - 8 - 14) * WEIGHT


def test_states_in_8_bits_leave_more_for_the_step() -> None:
    model = layers()
    with pytest.raises(
        BudgetError,
        match=r"weights take 8\.00 MiB .*, optimizer states 16\.00 MiB .*, and nothing is left for the step; raise it, or "
        r"give the optimizer states='8bit', which take 4\.\d+ MiB",
    ):
        stepped(model, fxprec.optim.AdamW(model.parameters(), lr=1e-3), 20 * WEIGHT)
    torch._dynamo.reset()
    stepped(model, fxprec.optim.AdamW(model.parameters(), lr=1e-3, states="8bit"), 20 * WEIGHT)


def test_a_step_that_does_not_fit_the_rest_says_who_holds_what() -> None:
    model = layers()
    with pytest.raises(
        BudgetError,
        match=r"^step_budget is 25\.00 MiB .*; weights take 8\.00 MiB .* Of the rest, peak_budget is 1\.00 MiB .* and the "
        r"least peak found holds .* Raise it, or give the optimizer states='8bit'",
    ):
        stepped(model, fxprec.optim.AdamW(model.parameters(), lr=1e-3), 25 * WEIGHT)


def test_a_graph_break_is_refused() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers(), layers()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            out: Tensor = self.second(x)
            return out

    model = Cut()
    with pytest.raises(BudgetError, match=r"a graph break cuts the step.*or give peak_budget"):
        stepped(model, fxprec.optim.AdamW(model.parameters(), lr=1e-3), 100 * WEIGHT)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"optimizer": None}, "no optimizer is given; give option optimizer too"),
        ({"peak_budget": "50%"}, "step_budget and peak_budget are both given"),
        ({"step_budget": "much"}, "step_budget is 'much', which is no size"),
        ({"activation_budget": "1MiB"}, "activation_budget"),
    ],
)
def test_what_a_step_budget_cannot_stand_beside_is_refused(options: dict[str, Any], why: str) -> None:
    model = layers()
    given = {"optimizer": fxprec.optim.AdamW(model.parameters()), "step_budget": "1GiB", **options}
    with pytest.raises(ConfigError, match=why):
        torch.compile(model, backend="fxprec", options=given)(torch.ones(8, WIDTH))


def test_a_copy_has_neither_optimizer_nor_budget() -> None:
    model = layers()
    backend = fxprec.Backend(optimizer=fxprec.optim.AdamW(model.parameters()), step_budget="1GiB")
    assert copy.deepcopy(backend).config.peak_budget is None


def test_tensors_that_share_memory_count_its_bytes_once() -> None:
    whole = torch.zeros(8, 4)
    parts = [whole[:6], whole[2:]]
    inputs = [GraphInput("first", "param", ""), GraphInput("second", "buffer", ""), GraphInput("x", "input", "")]
    optimizer = fxprec.optim.AdamW([nn.Parameter(torch.zeros(4))])
    found = StepBudget.of(1 << 20, optimizer, inputs, [*parts, torch.zeros(100)])
    assert found.weights == whole.nbytes + 16


def test_of_a_sharded_parameter_the_local_shard_counts() -> None:
    with one_rank() as mesh:
        whole = {"shape": torch.Size((12, 4)), "stride": (4, 1)}  # as if another rank held the other half
        param = nn.Parameter(DTensor.from_local(torch.zeros(6, 4), mesh, [Shard(0)], run_check=False, **whole))
        optimizer = fxprec.optim.AdamW([param])
        found = StepBudget.of(1 << 20, optimizer, [GraphInput("weight", "param", "")], [param])
    assert (found.weights, found.states) == (96, 192)


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()
