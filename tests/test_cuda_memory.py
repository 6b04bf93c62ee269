"""``peak_budget`` on a GPU: what is counted beside tensors, and the first step beside its plan. torch.cuda is a stub."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backend_helpers import eager_backend, mlp
from torch._subclasses.fake_tensor import FakeTensorMode

from fxprec import FxprecWarning, compat
from fxprec.driver.attempts import PeakAttempts
from fxprec.driver.event_log import EventLog
from fxprec.driver.memory import CompiledPeak, PlainHalf, StepMemory
from fxprec.errors import BudgetError
from fxprec.passes.analysis import gemm_costs
from fxprec.passes.analysis.gemm_costs import Gpu
from fxprec.passes.budget_part import BudgetPart
from fxprec.passes.crossings import peak_budget, reserve
from fxprec.plan import PeakBytes, entries, files

MIB, CUDA = 1 << 20, torch.device("cuda", 0)
H100, A100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0)), Gpu("NVIDIA A100-SXM4-80GB", (8, 0))


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        (0, 0),
        (1, 512),
        (512, 512),
        (513, 1024),
        (3 * MIB + 1, 3 * MIB + 512),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_blocks_are_rounded_as_the_caching_allocator_rounds_them(size: int, taken: int) -> None:
    assert compat.cuda_block_bytes(size) == taken


def test_a_replayed_step_counts_blocks() -> None:
    memory = compat.LiveBytes(taken=compat.cuda_block_bytes)
    tensors = [torch.empty(n, dtype=torch.uint8) for n in (1, 513)]
    memory.hold(tensors)
    memory.drop(tensors[0])
    assert (memory.peak, memory.live) == (512 + 1024, 1024)


def test_what_is_compiled_for_a_gpu_is_counted_in_blocks() -> None:
    source = (
        "def call(args):\n    x, = args\n    args.clear()\n    y = empty_strided_cuda((200,), (1,), torch.float32)\n"
    )
    with FakeTensorMode():
        x = torch.empty(1, device=CUDA)
    peak = CompiledPeak(1, "cuda")
    half = PlainHalf(("x",), ("y",), (x,), is_backward=False)
    peak.saw(half, SimpleNamespace(source_code=source + "    return (y, )\n", constants=None))
    assert (peak.unread, peak._forward, peak.waiting) == ("", 1024, 1024)


@pytest.mark.parametrize(
    ("gpu", "asked", "wanted"),
    [(H100, "", 32 * MIB), (A100, "", 8320 << 10), (A100, ":4096:8", 32 * MIB), (H100, ":16:8", 128 << 10)],
)
def test_workspaces_of_cublas_are_torchs_default_or_what_the_environment_says(
    gpu: Gpu, asked: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", asked)
    monkeypatch.setattr(gemm_costs, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(reserve, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reserve.workspaces(CUDA) == 2 * wanted, "forward's thread and backward's"


def test_torch_is_asked_where_it_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "cublas_workspace_size", lambda: 5 * MIB, raising=False)
    assert compat.cublas_workspace_bytes((9, 0)) == 5 * MIB


def test_a_budget_leaves_workspaces_and_an_allowance_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "workspaces", lambda device: 64 * MIB)
    assert reserve.reserved(torch.device("cpu"), 1000 * MIB) == 0
    free = reserve.reserved(CUDA, 1000 * MIB)
    assert free == 84 * MIB
    assert BudgetPart(beside=16 * MIB).bound(1000 * MIB, free).peak == 900 * MIB
    planned = PeakBytes(budget=1000 * MIB, high=0, planned=890 * MIB, beside=16 * MIB, reserved=free)
    assert planned.room == 900 * MIB
    more = reserve.enough_for(98 * MIB, 1000 * MIB)
    assert more - reserve.reserved(CUDA, more) >= 1000 * MIB - free + 98 * MIB


def test_what_libraries_take_is_part_of_the_message() -> None:
    budget = PeakAttempts(EventLog("graph 0", strict=False))
    budget.tried = [(0, 1000 * MIB)] * 4
    planned = PeakBytes(budget=1000 * MIB, high=0, planned=900 * MIB, reserved=100 * MIB)
    with pytest.raises(BudgetError, match=r"104857600 bytes\) of it for libraries.* raise it to .*\(1153433600 bytes"):
        budget.hold(planned, 998 * MIB, 0)


class Allocator:
    """Stands for `torch.cuda.memory_stats`."""

    def __init__(self, current: int, peak: int) -> None:
        self.current, self.peak = current, peak

    def __call__(self, device: torch.device) -> dict[str, int]:
        assert device == CUDA
        return {"allocated_bytes.all.current": self.current, "allocated_bytes.all.peak": self.peak}


def first_step(monkeypatch: pytest.MonkeyPatch, held: int, *, earlier: int = 0, graphs: int = 1) -> list[str]:
    """Run a forward and a backward that hold so much at the peak; return the events' details."""
    stats = Allocator(100 * MIB, max(100 * MIB, earlier))
    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    monkeypatch.setattr("fxprec.driver.memory.workspaces", lambda device: 64 * MIB)
    log = EventLog("graph 0", strict=True)
    peak = PeakBytes(budget=1000 * MIB, high=0, planned=900 * MIB, compiled=936 * MIB, graphs=graphs)
    memory = StepMemory(log, CUDA, lambda: peak)

    def forward(args: list[Any]) -> str:
        stats.peak = max(stats.peak, 100 * MIB + held)
        return "results"

    run = memory.watch(forward, "forward"), memory.watch(lambda args: "gradients", "backward")
    assert [half([]) for half in run] == ["results", "gradients"]
    stats.peak *= 2
    assert [half([]) for half in run] == ["results", "gradients"], "later steps are not looked at"
    assert {event.kind for event in log.events} <= {"memory"}
    return [event.detail for event in log.events]


@pytest.mark.parametrize(("held", "said"), [(1040, "4.0% more"), (900, "10.0% less")])
def test_the_first_step_says_by_how_much_the_plan_missed(held: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (detail,) = first_step(monkeypatch, held * MIB)
    assert detail.startswith("the first step held ")
    assert detail.endswith(f"with cuBLAS's workspaces: {said}")


def test_more_than_a_twentieth_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    words = r"^peak_budget .*: the first step held .* on cuda:0, the plan says .*: 10\.0% more; give it that much less"
    with pytest.warns(FxprecWarning, match=words):
        first_step(monkeypatch, 1100 * MIB)


def test_a_peak_of_before_hides_the_steps_own(monkeypatch: pytest.MonkeyPatch) -> None:
    (detail,) = first_step(monkeypatch, 900 * MIB, earlier=2000 * MIB)
    assert detail.startswith("the first step held at most ")


def test_graphs_that_share_a_step_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_step(monkeypatch, 2000 * MIB, graphs=2) == []


def test_a_cpus_halves_are_called_as_they_are() -> None:
    def run(args: list[Any]) -> None: ...

    assert StepMemory(EventLog("g", strict=False), torch.device("cpu"), lambda: None).watch(run, "forward") is run


def test_a_plan_file_keeps_what_is_reserved_and_says_nothing_where_nothing_is() -> None:
    for free in (0, 84 * MIB):
        written = files._peak(PeakBytes(budget=1000 * MIB, high=0, planned=890 * MIB, reserved=free))
        assert written.get("reserved", 0) == free
        assert ("reserved" in written) is bool(free)
        assert entries.record(PeakBytes, entries.Entry(written, "peak_bytes")).reserved == free


def test_a_budget_in_bytes_is_planned_without_what_stays_free_and_a_share_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peak_budget, "reserved", lambda device, budget: budget // 20)

    def planned(budget: int | str) -> PeakBytes:
        torch.compiler.reset()
        torch.manual_seed(0)
        backend = eager_backend("packed", recipe="bf16", peak_budget=budget, low_ratio=None)
        torch.compile(mlp(), backend=backend)(torch.randn(64, 16)).sum().backward()
        found = backend.plans[0].peak_bytes
        assert found is not None
        return found

    whole = planned("100%")
    assert (whole.reserved, whole.planned) == (0, whole.high)
    part = planned(whole.high * 11 // 10)
    assert part.reserved == part.budget // 20
    assert part.planned <= part.room
    words = (
        r"^peak_budget is .*, .* of it left free for libraries, 60 % of the .* saved, and the lowest .* raise it to "
    )
    with pytest.raises(BudgetError, match=words):
        planned(whole.high * 60 // 100)
