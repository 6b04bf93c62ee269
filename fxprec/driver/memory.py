"""Find a compiled step's peak memory by replaying both halves, compare it with a GPU's, and check torch's budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec import compat
from fxprec.driver.compiled import CodePeak
from fxprec.driver.event_log import EventLog
from fxprec.driver.wrappers import Run
from fxprec.ir.symbolic import Quantize
from fxprec.passes.analysis.joint import results_of
from fxprec.passes.analysis.operators import module_of
from fxprec.passes.analysis.replay.replay import drawn
from fxprec.passes.analysis.replay.workspace import workspace
from fxprec.passes.analysis.saved_bytes import largest_saved
from fxprec.passes.crossings.reserve import workspaces
from fxprec.passes.notice import Notice, readable
from fxprec.plan import PeakBytes

MISSED = 0.05  # share of the plan's bytes by which a first step may exceed them without a warning
SMALL = 64 * 1024  # bytes above torch's budget that are ignored: random seeds, statistics, one small tensor


@dataclass(frozen=True)
class PlainHalf:
    """One half before it is lowered: the names of its inputs and results, and examples of its inputs."""

    inputs: tuple[str, ...]
    results: tuple[str, ...]
    examples: Sequence[Any]
    is_backward: bool

    @classmethod
    def of(cls, gm: GraphModule, examples: Sequence[Any], *, is_backward: bool) -> PlainHalf:
        """Return the names of a half's inputs and results, with its examples."""
        results = (n.name if isinstance(n, Node) else f"result {i}" for i, n in enumerate(results_of(gm.graph)))
        inputs = (n.name for n in gm.graph.nodes if n.op == "placeholder")
        return cls(tuple(inputs), tuple(results), examples, is_backward)


@dataclass
class CompiledPeak:
    """The live bytes of one compiled step. Replay the forward half first: backward starts from its results."""

    num_results: int
    """Number of the forward half's own outputs, which come before the saved tensors."""
    device: str = "cpu"
    """Type of the device."""
    threads: int = 1
    """Threads of the CPU; libraries allocate memory in each."""
    bytes: int | None = None
    """Live bytes at the step's peak; None until both halves are replayed."""
    waiting: int = 0
    """Bytes of the forward half's results, live between the halves; without statistics."""
    seen: tuple[int, ...] = ()
    """Live bytes after each allocation of the step, in order."""
    unread: str = ""
    """Why a half could not be replayed; empty if it could."""
    _mode: compat.FakeTensorMode = field(default_factory=compat.FakeTensorMode)
    _forward: int = 0
    _free: frozenset[int] = frozenset()
    _inputs: Sequence[Any] = ()
    _results: Sequence[Any] = ()
    _named: dict[str, Any] = field(default_factory=dict)

    def of_code(self) -> CodePeak:
        """Return what was recorded, to be compared with a budget."""
        return CodePeak(self.bytes, self.waiting, drawn(self.seen, int), self.unread)

    def _memory(self) -> compat.LiveBytes:
        taken = compat.cuda_block_bytes if self.device == "cuda" else int
        return compat.LiveBytes(self._free, self.device, partial(workspace, threads=self.threads), taken)

    def saw(self, half: PlainHalf, code: object) -> None:
        """Replay a compiled half and record its live bytes."""
        try:
            if half.is_backward:
                self._saw_backward(half, code)
            else:
                self._saw_forward(half, code)
        except compat.NotReplayedError as error:
            self.unread = str(error)

    def _saw_forward(self, half: PlainHalf, code: object) -> None:
        self._inputs = compat.fakes_like(half.examples, self._mode)
        self._free = compat.storages_of(self._inputs)
        memory = self._memory()
        self._results = compat.replayed(code, self._inputs, self._mode, memory)
        self._named = dict(zip(half.results, self._results, strict=False))  # statistics come after them
        self.seen = tuple(memory.seen)
        self._forward = memory.peak
        own = self._results[: len(half.results)]
        self.waiting = compat.storage_bytes(own, self._free, self.device, memory.taken)

    def _saw_backward(self, half: PlainHalf, code: object) -> None:
        new = compat.fakes_like(half.examples, self._mode)
        inputs = [self._named.get(name, x) for name, x in zip(half.inputs, new, strict=True)]
        memory = self._memory()
        memory.hold(self._results[: self.num_results])  # the caller keeps the model's outputs alive
        compat.replayed(code, inputs, self._mode, memory)
        self.seen += tuple(memory.seen)
        self.bytes = max(self._forward, memory.peak)


class StepMemory:
    """A comparison of the first step's GPU memory with the plan, by the allocator's counts, which are not reset."""

    def __init__(self, log: EventLog, device: torch.device, planned: Callable[[], PeakBytes | None]) -> None:
        self._log, self._device, self._planned = log, device, planned
        self._start: tuple[int, int] | None = None
        self._is_done = device.type != "cuda"

    def watch(self, run: Run, half: str) -> Run:
        """Wrap ``run``, so that it reads allocated bytes before the first forward and the peak after the backward."""
        if self._is_done:
            return run

        def call(args: list[Any]) -> Any:
            if self._is_done:
                return run(args)
            if half == "forward":
                self._start = compat.allocated(self._device)
            results = run(args)
            if half == "backward" and self._start is not None:
                self._compare(*self._start)
            return results

        return compat.boxed(call)

    def _compare(self, start: int, peak_before: int) -> None:
        peak = self._planned()
        self._is_done = True
        if peak is None or peak.graphs > 1:  # other graphs of the step use memory too
            return
        highest = compat.allocated(self._device)[1]
        held = highest - start
        wanted = (peak.planned if peak.compiled is None else peak.compiled) + workspaces(self._device)
        if highest == peak_before:
            detail = (
                f"the first step held at most {readable(held)}, since the process had its peak before; the plan says "
            )
            self._log.note("memory", self._log.name, f"{detail}{readable(wanted)} with cuBLAS's workspaces", step=1)
            return
        missed = held / max(wanted, 1) - 1
        detail = (
            f"the first step held {readable(held)} on {self._device}, the plan says {readable(wanted)} with cuBLAS's "
            f"workspaces: {abs(missed):.1%} {'more' if missed > 0 else 'less'}"
        )
        self._log.note("memory", self._log.name, detail, step=1)
        if missed > MISSED:
            self._log.warn(
                f"peak_budget {readable(peak.budget)}: {detail}; give it that much less, or report it with "
                "torch.cuda.memory_stats()"
            )


def over_ratio(budget: float, read: int, saved: int, forward: Graph, num_outputs: int) -> Notice | None:
    """Return a notice if more is saved than ``budget`` (0 to 1) of the ``read`` bytes that backward reads."""
    largest = largest_saved(forward, num_outputs)
    if saved <= budget * read + SMALL or largest is None:
        return None
    node, size = largest
    cast = Quantize.match(node)
    made = node if cast is None else cast.x
    module = module_of(made)
    where = f"{made.name} ({module})" if module else made.name
    return Notice(
        f"activation_memory_budget={budget:g}",
        f"{readable(saved)} are saved for backward, {saved / read:.2f} of what it reads, and no choice was found "
        f"that saves less; the largest is {where}, {readable(size)}. torch.utils.checkpoint around a module "
        "saves only the module's inputs",
    )
