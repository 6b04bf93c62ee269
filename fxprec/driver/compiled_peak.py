"""What a step holds at its peak as it is compiled: both halves replayed by their own allocations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.fx import GraphModule, Node

from fxprec import compat
from fxprec.passes.analysis.joint import results_of
from fxprec.passes.analysis.peak.workspace import workspace


@dataclass(frozen=True)
class PlainHalf:
    """One half before it is lowered: the names of its inputs and results, and examples of its inputs."""

    inputs: tuple[str, ...]
    results: tuple[str, ...]
    examples: Sequence[Any]
    is_backward: bool

    @classmethod
    def of(cls, gm: GraphModule, examples: Sequence[Any], *, is_backward: bool) -> PlainHalf:
        results = (n.name if isinstance(n, Node) else f"result {i}" for i, n in enumerate(results_of(gm.graph)))
        inputs = (n.name for n in gm.graph.nodes if n.op == "placeholder")
        return cls(tuple(inputs), tuple(results), examples, is_backward)


@dataclass
class CompiledPeak:
    """Live bytes of one step. The forward half comes first; its results are what backward starts from."""

    num_results: int
    """Of the forward half, before what it saves for backward."""
    device: str = "cpu"
    """Its type."""
    threads: int = 1
    """Of the CPU, in each of which libraries take memory."""
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
        beside = partial(workspace, threads=self.threads)
        return compat.LiveBytes(self._free, self.device, beside, self._taken)

    @property
    def _taken(self) -> Callable[[int], int]:
        return compat.cuda_block_bytes if self.device == "cuda" else int

    def saw(self, half: PlainHalf, code: Any) -> None:
        """Take in a compiled half."""
        try:
            if half.is_backward:
                self._saw_backward(half, code)
            else:
                self._saw_forward(half, code)
        except compat.NotReplayedError as error:
            self.unread = str(error)

    def _saw_forward(self, half: PlainHalf, code: Any) -> None:
        self._inputs = compat.fakes_like(half.examples, self._mode)
        self._free = compat.storages_of(self._inputs)
        memory = self._memory()
        self._results = compat.replayed(code, self._inputs, self._mode, memory)
        self._named = dict(zip(half.results, self._results, strict=False))  # statistics come after them
        self.seen = tuple(memory.seen)
        self._forward, self.waiting = memory.peak, compat.storage_bytes(self._results, self._free, self.device)

    def _saw_backward(self, half: PlainHalf, code: Any) -> None:
        new = compat.fakes_like(half.examples, self._mode)
        inputs = [self._named.get(name, x) for name, x in zip(half.inputs, new, strict=True)]
        memory = self._memory()
        memory.hold(self._results[: self.num_results])  # the model's own outputs: the caller has them
        compat.replayed(code, inputs, self._mode, memory)
        self.seen += tuple(memory.seen)
        self.bytes = max(self._forward, memory.peak)
