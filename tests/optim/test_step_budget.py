"""Option ``step_budget``: weights, the optimizer's states and the step's peak within one number of bytes."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import one_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fxprec
from fxprec.driver.step_budget import StepBudget
from fxprec.errors import BudgetError, ConfigError
from fxprec.passes.analysis.inputs import GraphInput
from fxprec.plan.explain import explain
from fxprec.runtime.optim.all_optimizers import AllOptimizers

WIDTH, LAYERS = 512, 8
WEIGHT = WIDTH * WIDTH * 4


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def stepped(model: nn.Module, optimizer: object, budget: object, **options: Any) -> Any:
    given = {"recipe": "bf16", "lowering": "eager", "optimizer": optimizer, "step_budget": budget, **options}
    run = torch.compile(model, backend="fxprec", options=given)
    run(torch.ones(8, WIDTH)).sum().backward()
    return run


@pytest.mark.parametrize("states", [None, "float32", "bf16", "8bit", "4bit"])
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


@pytest.mark.parametrize("ways", [("recompute",), ("narrow",)])
def test_the_ways_to_meet_the_rest_may_be_chosen(ways: tuple[str, ...]) -> None:
    model = layers()
    run = stepped(model, fxprec.optim.SGD(model.parameters(), 0.1), (LAYERS + 4) * WEIGHT, ways=ways)
    assert fxprec.backend_of(run).plans[0].peak_bytes is not None


def test_frozen_parameters_count_too() -> None:
    model = layers()
    model[0].requires_grad_(False)
    optimizer = fxprec.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    (plan,) = fxprec.backend_of(stepped(model, optimizer, 27 * WEIGHT)).plans
    assert plan.peak_bytes is not None
    assert plan.peak_bytes.budget == (27 - 8 - 14) * WEIGHT


def test_states_in_8_bits_leave_more_for_the_step() -> None:
    model = layers()
    words = (
        r"^step_budget is 20\.00 MiB .*; weights take 8\.00 MiB .*, optimizer states 16\.00 MiB .*; in addition to "
        r"these the lowest peak found is 1\.\d+ MiB .*, which includes .*; raise it to 25\.\d+ MiB \(\d+ bytes\), give "
        r"the optimizer states='8bit', which take 4\.\d+ MiB"
    )
    with pytest.raises(BudgetError, match=words):
        stepped(model, fxprec.optim.AdamW(model.parameters(), lr=1e-3), 20 * WEIGHT)
    torch._dynamo.reset()
    stepped(model, fxprec.optim.AdamW(model.parameters(), lr=1e-3, states="8bit"), 20 * WEIGHT)


def test_states_in_4_bits_are_named_where_8_are_too_many() -> None:
    model = layers()
    words = (
        r", give the optimizer states='4bit', which take 2\.\d+ MiB \(\d+ bytes\), hold weights in bfloat16 .*or choose"
    )
    with pytest.raises(BudgetError, match=words) as error:
        stepped(model, fxprec.optim.AdamW(model.parameters(), lr=1e-3, states="8bit"), 12 * WEIGHT)
    assert "batch" not in str(error.value), "weights and states are most of the step, and no batch changes them"
    torch._dynamo.reset()
    stepped(model, fxprec.optim.AdamW(model.parameters(), lr=1e-3, states="4bit"), 13 * WEIGHT)


def test_a_step_that_does_not_fit_the_rest_says_who_holds_what() -> None:
    model = layers()
    with pytest.raises(
        BudgetError,
        match=r"^step_budget is 25\.00 MiB .*; weights take 8\.00 MiB .*; in addition to these the lowest "
        r"peak found is .* MiB .*; raise it to .*, give the optimizer states='8bit'",
    ):
        stepped(model, fxprec.optim.AdamW(model.parameters(), lr=1e-3), 25 * WEIGHT)


@pytest.mark.parametrize(("budget", "form"), [(27, "float32"), (25, "bf16"), (17, "8bit"), (13, "4bit")])
def test_open_states_take_the_most_exact_form_that_fits(budget: int, form: Any) -> None:
    model, other = layers(), layers()
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=1e-3, states="auto")
    asked = fxprec.optim.AdamW(other.parameters(), lr=1e-3, states=form)
    for net, stepper in ((model, optimizer), (other, asked)):
        run = stepped(net, stepper, budget * WEIGHT)
        (plan,) = fxprec.backend_of(run).plans
        assert plan.whole_step is not None
        assert plan.whole_step.chosen == (form if stepper is optimizer else "")
        assert plan.whole_step.states == asked.state_bytes()
        assert plan.peak_bytes is not None
        assert plan.peak_bytes.budget == (budget - 8) * WEIGHT - asked.state_bytes()
        for _ in range(2):
            stepper.step()
            stepper.zero_grad()
            run(torch.ones(8, WIDTH)).square().mean().backward()
        (event,) = (event for event in fxprec.backend_of(run).events if event.kind == "memory")
        assert (f"in {form} (states='auto')" in event.detail) == (stepper is optimizer)
        torch._dynamo.reset()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    held = {t.dtype for state in optimizer.state.values() for name, t in state.items() if name == "exp_avg"}
    assert held == {{"float32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8, "4bit": torch.int8}[form]}


def test_only_groups_that_leave_states_open_are_chosen_for() -> None:
    model = layers()
    first, second = list(model.parameters())[:4], list(model.parameters())[4:]
    groups = [{"params": first, "states": "auto"}, {"params": second, "states": "float32"}]
    optimizer = fxprec.optim.AdamW(groups, lr=1e-3)
    stepped(model, optimizer, 21 * WEIGHT)  # weights 8, states asked for 8: with 4 in bfloat16 1 is left, too little
    assert [group["states"] for group in optimizer.param_groups] == ["8bit", "float32"]


def test_open_states_that_fit_in_no_form_stay_open_and_the_least_is_said() -> None:
    model = layers()
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=1e-3, states="auto")
    with pytest.raises(
        BudgetError,
        match=r"optimizer states 2\.\d+ MiB .* in 4bit \(states='auto'\); in addition to these the lowest peak found",
    ):
        stepped(model, optimizer, 10 * WEIGHT)
    assert optimizer.param_groups[0]["states"] == "auto"


@pytest.mark.parametrize("budget", [10, 25])
@pytest.mark.parametrize("states", ["float32", "auto"])
def test_the_budget_that_an_error_names_is_the_least_that_can_be_given(budget: int, states: Any) -> None:
    """10: nothing is left for the step. 25: too little with float32 states."""
    if (budget, states) == (25, "auto"):
        budget = 11

    def run(budget: int) -> None:
        torch._dynamo.reset()
        model = layers()
        stepped(model, fxprec.optim.AdamW(model.parameters(), lr=1e-3, states=states), budget)

    with pytest.raises(BudgetError) as raised:
        run(budget * WEIGHT)
    named = re.search(r"raise it to \d+\.\d+ MiB \((\d+) bytes\)", str(raised.value))
    assert named is not None
    run(int(named[1]))
    with pytest.raises(BudgetError, match=f"raise it to .* MiB .{named[1]} bytes"):
        run(int(named[1]) - 1)


def test_open_states_are_exact_without_a_budget() -> None:
    one, other = layers(), layers()
    for net, states in ((one, "auto"), (other, "float32")):
        optimizer = fxprec.optim.AdamW(net.parameters(), lr=1e-3, states=states)
        net(torch.ones(8, WIDTH)).sum().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_loaded_state_does_not_open_what_a_budget_has_chosen() -> None:
    param = nn.Parameter(torch.zeros(4))
    optimizer = fxprec.optim.AdamW([param], states="auto")
    opened = optimizer.state_dict()
    optimizer.close_states("8bit")
    optimizer.load_state_dict(opened)
    assert optimizer.param_groups[0]["states"] == "8bit"


def test_the_plan_says_what_the_budget_counts(tmp_path: Path) -> None:
    model = layers()
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=1e-3, states="auto")
    (plan,) = fxprec.backend_of(stepped(model, optimizer, 25 * WEIGHT)).plans
    plan.save(tmp_path / "plan.json")
    read = fxprec.Plan.load(tmp_path / "plan.json")
    assert read.whole_step == plan.whole_step
    assert explain(read, "step_budget")[:3] == [
        f"step_budget {25 * WEIGHT:,} bytes",
        f"  weights and buffers take {8 * WEIGHT:,}",
        f"  optimizer states take {8 * WEIGHT:,}, in bf16: states='auto', and no more exact form fits",
    ]
    assert explain(replace(read, whole_step=None), "step_budget")[0].startswith("step_budget: none was asked for")


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
    with pytest.raises(BudgetError, match=r"a graph break splits the step.*or give peak_budget"):
        stepped(model, fxprec.optim.AdamW(model.parameters(), lr=1e-3), 100 * WEIGHT)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"optimizer": None}, "no optimizer is given; give option optimizer too"),
        ({"peak_budget": "50%"}, "step_budget and peak_budget are both given"),
        ({"step_budget": "much"}, "step_budget is 'much', which is not a size"),
        ({"activation_budget": "1MiB"}, "^step_budget and activation_budget are both given"),
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
    found = StepBudget.of(1 << 20, AllOptimizers([optimizer]), inputs, [*parts, torch.zeros(100)])
    assert found.weights == whole.nbytes + 16


def test_of_a_sharded_parameter_the_local_shard_counts() -> None:
    with one_rank():
        mesh = DeviceMesh("cpu", [0])
        whole = {"shape": torch.Size((12, 4)), "stride": (4, 1)}  # as if another rank held the other half
        param = nn.Parameter(DTensor.from_local(torch.zeros(6, 4), mesh, [Shard(0)], run_check=False, **whole))
        optimizer = fxprec.optim.AdamW([param])
        found = StepBudget.of(1 << 20, AllOptimizers([optimizer]), [GraphInput("weight", "param", "")], [param])
    assert (found.weights, found.states) == (96, 192)
