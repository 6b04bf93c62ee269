"""What a compiled step holds in memory: replayed from both halves, measured on a GPU, compared with torch's budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec import compat
from fxprec.driver.event_log import EventLog
from fxprec.driver.wrappers import Run
from fxprec.ir.symbolic import Quantize
from fxprec.passes.analysis.joint import results_of
from fxprec.passes.analysis.operators import module_of
from fxprec.passes.analysis.replay.workspace import workspace
from fxprec.passes.analysis.saved_bytes import largest_saved
from fxprec.passes.crossings.reserve import workspaces
from fxprec.passes.notice import Notice, readable
from fxprec.plan import PeakBytes

MISSED = 0.05  # of the plan's bytes, above which what a first step held is a warning
SMALL = 64 * 1024  # bytes above torch's budget that are not worth a word: random seeds, statistics, one small tensor


@dataclass(frozen=True)
class PlainHalf:
    """One half before it is lowered: the names of its inputs and results, and examples of its inputs."""

    inputs: tuple[str, ...]
    results: tuple[str, ...]
    examples: Sequence[Any]
    is_backward: bool

    @classmethod
    def of(cls, gm: GraphModule, examples: Sequence[Any], *, is_backward: bool) -> PlainHalf:
        """Take the names of a half's inputs and results."""
        results = (n.name if isinstance(n, Node) else f"result {i}" for i, n in enumerate(results_of(gm.graph)))
        inputs = (n.name for n in gm.graph.nodes if n.op == "placeholder")
        return cls(tuple(inputs), tuple(results), examples, is_backward)


@dataclass
class CompiledPeak:
    """Live bytes of one step. The forward half comes first; its results are what backward starts from."""

    num_results: int
    """Number of the forward half's own outputs, which come before what it saves for backward."""
    device: str = "cpu"
    """Its type."""
    threads: int = 1
    """Threads of the CPU; libraries take memory in each."""
    bytes: int | None = None
    """At the step's peak, once both halves are there."""
    waiting: int = 0
    """Between the halves."""
    seen: tuple[int, ...] = ()
    """What lived over the step, each time something was made."""
    unread: str = ""
    """Why it is not known."""
    _mode: compat.FakeTensorMode = field(default_factory=compat.FakeTensorMode)
    _forward: int = 0
    _free: frozenset[int] = frozenset()
    _inputs: Sequence[Any] = ()
    _results: Sequence[Any] = ()
    _named: dict[str, Any] = field(default_factory=dict)

    def _memory(self) -> compat.LiveBytes:
        taken = compat.cuda_block_bytes if self.device == "cuda" else int
        return compat.LiveBytes(self._free, self.device, partial(workspace, threads=self.threads), taken)

    def saw(self, half: PlainHalf, code: object) -> None:
        """Take in a compiled half."""
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
        self.waiting = compat.storage_bytes(self._results, self._free, self.device, memory.taken)

    def _saw_backward(self, half: PlainHalf, code: object) -> None:
        new = compat.fakes_like(half.examples, self._mode)
        inputs = [self._named.get(name, x) for name, x in zip(half.inputs, new, strict=True)]
        memory = self._memory()
        memory.hold(self._results[: self.num_results])  # the model's own outputs: the caller has them
        compat.replayed(code, inputs, self._mode, memory)
        self.seen += tuple(memory.seen)
        self.bytes = max(self._forward, memory.peak)


class StepMemory:
    """Compares once, by the caching allocator's own counts, which it does not reset."""

    def __init__(self, log: EventLog, device: torch.device, planned: Callable[[], PeakBytes | None]) -> None:
        self._log, self._device, self._planned = log, device, planned
        self._start: tuple[int, int] | None = None
        self._is_done = device.type != "cuda"

    def watch(self, run: Run, half: str) -> Run:
        """Return ``run``, which notes what was allocated before its first forward, and at the peak of its backward."""
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
        if peak is None or peak.graphs > 1:  # other graphs of the step hold memory too
            return
        highest = compat.allocated(self._device)[1]
        held = highest - start
        wanted = (peak.planned if peak.compiled is None else peak.compiled) + workspaces(self._device)
        if highest == peak_before:
            detail = f"the first step held at most {readable(held)}, and more lived before it; the plan says "
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
    """Say what holds memory where more is saved than ``budget`` (0 to 1) of the ``read`` bytes that backward reads."""
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
        "saves what the module starts from and nothing else of it",
    )
