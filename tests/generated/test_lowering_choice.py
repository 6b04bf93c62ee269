"""``lowering="auto"``: which of both lowerings a half gets, what the plan says of it, and regions that are not worth it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parents[1]))


from generated.kernel_helpers import lower_half, scale_table, stored, traced

from fxprec import Backend, compat
from fxprec.config import Config
from fxprec.driver import lowering as lowering_choice
from fxprec.driver.lowering import Lowering
from fxprec.errors import PlanError
from fxprec.passes.analysis import gemm_costs
from fxprec.passes.analysis.gemm_costs import Gpu
from fxprec.passes.analysis.traffic import estimate
from fxprec.passes.analysis.traffic.estimate import Traffic
from fxprec.passes.lowering.triton.regions import find_regions
from fxprec.passes.lowering.triton.split_loops import without_split_loops
from fxprec.passes.notice import Notice
from fxprec.plan import Plan
from fxprec.plan.explain import explain
from fxprec.plan.rows import HalfLowering, LoweringChoice, LoweringEstimate, Moved
from fxprec.report.dump_folder import DumpFolder
from fxprec.report.target import plan_under_fakes

TABLE = scale_table(["1-4-3+4", "1-5-2"])
X, W = torch.zeros(64, 128), torch.zeros(128, 128)
H100 = gemm_costs.costs_of(Gpu("NVIDIA H100", (9, 0)))


def on_gpu(monkeypatch: pytest.MonkeyPatch, tell: Callable[[Notice], object] = lambda n: None) -> Lowering:
    """Return ``auto`` as on an H100 that is not there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gemm_costs, "gpu_of", lambda device: Gpu("NVIDIA H100", (9, 0)))
    monkeypatch.setattr(compat, "no_triton", lambda device: None)  # interpreted tests too
    return Lowering(Config(recipe="hfp8"), torch.device("cuda"), tell)  # type: ignore[arg-type]


lower_on_gpu = partial(lower_half, device="cuda")


def half(function: Callable[..., object], *inputs: Tensor) -> GraphModule:
    return traced(function, *inputs, TABLE)


def rounded_operands(x: Tensor, w: Tensor, table: Tensor) -> list[Tensor]:
    """Two casts between tensors in memory: as many bytes both ways, and generated kernels need no further one to count."""
    q, value = stored(torch.relu(x) * 2, table)
    other, weight = stored(w, table, 1, "1-5-2")
    return [q, other, value.to(torch.float32) @ weight]


def gathered(x: Tensor, w: Tensor, table: Tensor) -> list[Tensor]:
    """A cast of what Inductor alone computes."""
    return [stored(torch.cumsum(x, 0).flip(0).roll(1, 0) * w[:64], table)[0]]


@pytest.mark.parametrize("inductor", [Traffic(3, 1000), Traffic(2, 1000), Traffic(2, 10**9)])
def test_the_half_with_the_less_time_is_taken_and_a_tie_is_inductors(inductor: Traffic) -> None:
    triton = Traffic(2, 1000)
    found = lowering_choice._cheaper({"inductor": inductor, "triton": triton}, H100)
    assert found.chosen == ("inductor" if inductor == triton else "triton")
    assert (found.inductor.bytes, found.triton.launches) == (inductor.bytes, 2)
    assert found.triton.seconds == triton.seconds(H100)


def test_what_is_taken_is_what_is_lowered_and_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    lowering = on_gpu(monkeypatch)
    assert lowering.chooser is not None
    assert lowering.chooser.for_plan() is None, "nothing is chosen yet"
    gm, lowered = lowering.lower(half(rounded_operands, X, W), lower_on_gpu, "forward")
    assert lowered.generated.kernels
    assert gm.graph.find_nodes(op="call_function", target=compat.TritonCalls.target)
    plain, lowered = lowering.lower(half(gathered, X, W), lower_on_gpu, "backward")
    assert not lowered.generated.kernels
    assert not plain.graph.find_nodes(op="call_function", target=compat.TritonCalls.target)
    choice = lowering.chooser.for_plan()
    assert choice is not None
    assert choice.estimate is not None
    assert (choice.asked, choice.chosen) == ("auto", "mixed")
    forward, backward = choice.estimate.forward, choice.estimate.backward
    assert forward is not None
    assert backward is not None
    assert (forward.chosen, backward.chosen) == ("triton", "inductor")
    assert forward.triton.seconds < forward.inductor.seconds


def test_an_estimate_that_fails_is_told_and_inductor_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Notice] = []
    lowering = on_gpu(monkeypatch, told.append)
    monkeypatch.setattr(estimate, "traffic_of", lambda graph: 1 // 0)
    gm = half(rounded_operands, X, W)
    same, lowered = lowering.lower(gm, lower_on_gpu, "forward")
    assert same is gm
    assert not lowered.generated.kernels
    (notice,) = told
    assert notice.site == "lowering='auto'"
    assert "forward half: ZeroDivisionError" in notice.detail
    assert lowering.chooser is not None
    choice = lowering.chooser.for_plan()
    assert choice is not None
    assert choice.chosen == "inductor"
    assert "ZeroDivisionError" in choice.why


def model() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 16)


def planned(tmp_path: Path, lowering: Any) -> Plan:
    """Plan for this CPU; nothing is compiled."""
    folder = DumpFolder(tmp_path, plan_only=True)
    backend = Backend(Config(recipe="fp8", low_ratio=1.0, lowering=lowering, dump=tmp_path), dump=folder)
    plan_under_fakes(model, backend, "model", folder)
    return Plan.load(tmp_path / "graph-0" / "plan.json")


def test_on_a_cpu_the_plan_says_what_auto_is(tmp_path: Path) -> None:
    plan = planned(tmp_path, "auto")
    assert plan.lowering == LoweringChoice(asked="auto", chosen="inductor", why=lowering_choice._ON_CPU)
    said = {"asked": "auto", "chosen": "inductor", "why": lowering_choice._ON_CPU}
    assert plan.to_dict()["lowering"] == said
    assert said["why"] in (tmp_path / "graph-0" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("asked", ["inductor", "eager"])
def test_a_lowering_asked_for_is_no_choice(tmp_path: Path, asked: str) -> None:
    assert "lowering" not in planned(tmp_path, asked).to_dict()


FEW, MANY = Moved(launches=2, bytes=3_000_000, seconds=1.5e-5), Moved(launches=5, bytes=4_000_000, seconds=2e-5)
CHOICE = LoweringChoice(
    asked="auto",
    chosen="mixed",
    why="less",
    estimate=LoweringEstimate(
        forward=HalfLowering(chosen="triton", inductor=MANY, triton=FEW),
        backward=HalfLowering(chosen="inductor", inductor=FEW, triton=MANY),
    ),
)


def test_plan_files_keep_the_choice_and_those_without_load(tmp_path: Path) -> None:
    plan = Plan(lowering=CHOICE)
    assert plan.to_dict()["lowering"]["estimate"]["forward"]["triton"] == {
        "launches": 2,
        "bytes": 3_000_000,
        "seconds": 1.5e-5,
    }
    for one in (plan, replace(plan, lowering=replace(CHOICE, estimate=LoweringEstimate(forward=None))), Plan()):
        one.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json").lowering == one.lowering
    data: dict[str, Any] = plan.to_dict()
    data["lowering"]["estimate"]["backward"]["chosen"] = "cuda"
    with pytest.raises(PlanError, match=r"lowering\.estimate\.backward\.chosen: is 'cuda'.*'inductor', 'triton'"):
        Plan.from_dict(data)


def test_explain_says_which_lowering_was_taken() -> None:
    assert explain(Plan(lowering=CHOICE), "lowering") == [
        "lowering 'auto' took generated Triton kernels in one half and Inductor's own in the other: less",
        "  forward, triton: Inductor's 5 launches, 0.004 GB, 0.02 ms; generated 2 launches, 0.003 GB, 0.015 ms",
        "  backward, inductor: Inductor's 2 launches, 0.003 GB, 0.015 ms; generated 5 launches, 0.004 GB, 0.02 ms",
    ]
    (line,) = explain(Plan(), "lowering")
    assert line.startswith("lowering: this plan records no choice of lowering='auto'")


def regions(function: Callable[..., object], *inputs: Tensor) -> tuple[int, int]:
    """Return how many regions there are, and how many split no loop."""
    gm = half(function, *inputs)
    found = find_regions(gm.graph)
    return len(found), len(without_split_loops(gm.graph, found))


def test_a_region_between_tensors_in_memory_is_whole() -> None:
    assert regions(rounded_operands, X, W) == (2, 2)
    assert regions(lambda x, w, table: stored(torch.relu(x @ w), table)[1] @ w, X, W) == (1, 1)


@pytest.mark.parametrize(
    "function",
    [
        gathered,
        lambda x, w, table: stored(torch.cat([x, x * 2], -1) * 2, table)[0],
        lambda x, w, table: stored(x, table)[1].flip(0) * 2,
        lambda x, w, table: stored(x * 2, table)[1].sum(0),
    ],
    ids=["after Inductor's arithmetic", "after cat", "before Inductor's arithmetic", "before a sum over columns"],
)
def test_a_region_that_hands_wide_values_to_inductors_arithmetic_is_torn(function: Callable[..., object]) -> None:
    assert regions(function, X, W) == (1, 0)


def test_what_waits_for_a_gemm_behind_the_region_is_read_again_in_any_case() -> None:
    def f(x: Tensor, w: Tensor, table: Tensor) -> Tensor:
        value = torch.relu(x) * 2
        return (stored(value, table)[1] @ w) * value

    assert regions(f, X, W) == (1, 1)


def test_regions_that_read_all_of_one_tensor_read_it_once() -> None:
    def f(x: Tensor, w: Tensor, table: Tensor) -> list[Tensor]:
        first = stored(x, table)[0]
        second = stored(x * torch.rsqrt(x.square().mean(-1, keepdim=True)), table, 1, "1-5-2")[0]
        return [first, second]

    assert regions(f, X, W) == (1, 1)
