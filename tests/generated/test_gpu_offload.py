"""What Inductor writes for a GPU where saved tensors wait in host memory: its own code, replayed on fake CUDA tensors."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import FeedForward
from torch import nn

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not installed

import fxprec.driver.graph
from benchmarks.gpu.absent import inductor_code, lowered_halves, pretend
from fxprec import Backend, Config, Plan, compat
from fxprec.config.processor import Processor
from fxprec.driver.half_compilation import in_saving_order
from fxprec.driver.memory import CompiledPeak, PlainHalf
from fxprec.kernels.host import IN_PLACE_ORDER, Offload, Reload

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION", "ignore:weigh-gemms", "ignore:storage=")


@dataclass
class Code:
    """Of one plan."""

    plan: Plan
    halves: list[torch.fx.GraphModule]
    texts: list[str]
    peak: CompiledPeak

    def calls(self, half: int, name: str) -> int:
        return self.texts[half].count(f"torch.ops.fxprec.{name}.default(")


def compiled(monkeypatch: pytest.MonkeyPatch, lowering: str, **options: Any) -> Code:
    """Return what an H100 would run of a training step, and what it holds by its own allocations."""
    plans: list[Plan] = []

    def step() -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        # Two threads: beside one thread's workspace all of it stays within the budget.
        backend = Backend(Config(recipe="fp8", lowering="eager", promote_above=None, cpu="avx512+bf16:2", **options))
        model = nn.Sequential(*(FeedForward(64, 256, norm=True) for _ in range(3)))
        torch.compile(model, backend=backend)(torch.randn(256, 64)).square().mean().backward()
        plans.extend(backend.plans)

    with monkeypatch.context() as patch:
        patch.setattr(fxprec.driver.graph, "refuse_offload", lambda device, settings, given: None)
        halves = lowered_halves(patch, step, lowering, 90)
        pretend(patch, 90)
        peak, texts = CompiledPeak(1, "cuda"), list[str]()
        for gm, name in zip(halves, ("forward", "backward"), strict=True):
            examples = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
            plain = PlainHalf.of(gm, examples, is_backward=name == "backward")
            with (
                torch._inductor.config.patch(force_disable_caches=True),
                compat.saving_memory(partial(in_saving_order, Processor.here()), "test", IN_PLACE_ORDER),
            ):
                texts.append(inductor_code(gm, name))
            peak.saw(plain, SimpleNamespace(source_code=texts[-1], constants=None))
    return Code(plans[0], halves, texts, peak)


def moved_bytes(half: torch.fx.GraphModule) -> int:
    hosts = [n.meta["val"] for n in half.graph.find_nodes(op="call_function", target=Offload.target)]
    assert all(host.device.type == "cpu" for host in hosts)
    return sum(host.nbytes for host in hosts)


@pytest.mark.parametrize(
    ("lowering", "ways", "share"),
    [
        ("inductor", ("offload",), "65%"),
        ("triton", ("narrow", "offload"), "64%"),
        pytest.param("inductor", ("narrow", "offload"), "64%", marks=pytest.mark.full),
        pytest.param("triton", ("offload",), "65%", marks=pytest.mark.full),
    ],
)
def test_the_device_is_free_of_what_waits_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lowering: str, ways: tuple[str, ...], share: str
) -> None:
    found = compiled(monkeypatch, lowering, peak_budget=share, ways=ways)
    moved = [s for s in found.plan.sites if s.way == "offload"]
    assert moved
    assert found.plan.peak_bytes is not None
    count = len(moved) + len(found.plan.peak_bytes.offloaded)
    assert (found.calls(0, "offload"), found.calls(0, "reload")) == (count, 0)
    assert (found.calls(1, "offload"), found.calls(1, "reload")) == (0, count)
    sites = [
        replace(s, way="narrow" if s.format == "e4m3fn" else "keep") if s in moved else s for s in found.plan.sites
    ]
    kept = found.plan.peak_bytes.kept + found.plan.peak_bytes.offloaded
    peak = replace(found.plan.peak_bytes, kept=kept, offloaded=())
    replace(found.plan, sites=tuple(sites), peak_bytes=peak).save(tmp_path / "plan.json")
    staying = compiled(monkeypatch, lowering, plan=tmp_path / "plan.json")
    assert not staying.calls(0, "offload")
    assert staying.peak.waiting - found.peak.waiting == moved_bytes(found.halves[0]) > 0
    assert found.peak.bytes is not None
    assert found.peak.bytes <= found.plan.peak_bytes.budget, "copies that come back early are within it too"


def calls_of(text: str) -> list[tuple[str, str, str]]:
    """Return what the code calls, in order: an operator of ours, a ``kernel`` or ``del``; its operands; its result."""
    found: list[tuple[str, str, str]] = []
    alias: dict[str, str] = {}  # torch 2.13 gives a result two names
    for line in (line.strip() for line in text[text.index("def call") :].splitlines()):
        if match := re.fullmatch(r"(\w+) = torch\.ops\.fxprec\.(\w+)\.default\((.*)\)", line):
            found.append((match[2], match[3], match[1]))
        elif match := re.fullmatch(r"(buf\d+) = (buf\d+)", line):
            alias[match[2]] = match[1]
        elif ".run(" in line or "extern_kernels." in line:
            found.append(("kernel", line, ""))
        elif line.startswith("del "):
            found.append(("del", line, ""))
    return [(name, operands, alias.get(result, result)) for name, operands, result in found]


def reads(name: str, operands: str) -> bool:
    return re.search(rf"\b{name}\b", operands) is not None


def test_copies_run_beside_kernels_and_are_waited_for_before_memory_is_freed_or_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = compiled(monkeypatch, "inductor", peak_budget="66%", ways=("narrow", "offload"))
    for node in found.halves[1].graph.find_nodes(op="call_function", target=Reload.target):
        host = node.args[0]
        assert (host.op, host.meta["val"].device.type, node.meta["val"].device.type) == ("placeholder", "cpu", "cuda")
        assert list(host.users) == [node]
    forward, backward = map(calls_of, found.texts)
    hidden = 0
    for at, (name, x, host) in enumerate(forward):
        if name == "offload":
            sent = next(i for i, (n, o, _) in enumerate(forward) if n == "wait_offload" and o == f"{host}, {x}")
            freed = next((i for i, (n, o, _) in enumerate(forward) if n == "del" and reads(x, o)), len(forward))
            assert [n for n, o, _ in forward[:at] if reads(x, o)] == ["kernel"], "behind the kernel that makes it"
            assert at < sent < freed
            hidden += sum(n == "kernel" for n, _, _ in forward[at:sent])
    for at, (name, _, x) in enumerate(backward):
        if name == "reload":
            come, shown = next((i, r) for i, (n, o, r) in enumerate(backward) if n == "wait_reload" and o == x)
            read = next(i for i, (n, o, _) in enumerate(backward) if n == "kernel" and reads(shown, o))
            assert not any(reads(x, o) for n, o, _ in backward[at + 1 : come])
            assert at < come < read
            assert sum(n == "kernel" for n, _, _ in backward[come:read]) <= 1, "at most one beside what is read there"
            hidden += sum(n == "kernel" for n, _, _ in backward[at:come])
    assert hidden > 4 * len(calls_named(forward, "offload")) > 0, "kernels run meanwhile"


def calls_named(calls: list[tuple[str, str, str]], name: str) -> list[tuple[str, str, str]]:
    return [call for call in calls if call[0] == name]


def test_planned_again_by_what_the_code_allocates_the_budget_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the driver does where a plan holds more as compiled: on a GPU weights' gradients are float32 from the start."""
    first = compiled(monkeypatch, "inductor", peak_budget="68%", ways=("offload",))
    planned = first.plan.peak_bytes
    assert planned is not None
    assert first.peak.bytes is not None
    excess = max(first.peak.bytes - planned.planned, 0)
    second = compiled(monkeypatch, "inductor", peak_budget=planned.budget - excess, ways=("offload",))
    assert second.calls(1, "reload")
    assert second.peak.bytes is not None
    assert second.peak.bytes <= planned.budget < planned.high
