"""Keeping a step: each half of each graph, before it is lowered, with the arguments of its last run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from fxprec import compat
from fxprec.driver.compiled import Planned
from fxprec.passes.analysis.inputs import GraphInput

Compiled = Callable[..., Any]


@dataclass
class RecordedHalf:
    """One half of a partitioned graph, casts symbolic. ``args`` are those of its last run, or None before one."""

    gm: GraphModule
    planned: Planned | None
    """None where nothing of the graph is rounded."""
    args: tuple[Any, ...] | None = None


@dataclass
class Recorder:
    """Halves by graph name (``graph 0``), then ``"forward"`` and ``"backward"``, of the latest compilation of each."""

    graphs: dict[str, dict[str, RecordedHalf]] = field(default_factory=dict)
    inputs: dict[str, tuple[GraphInput, ...]] = field(default_factory=dict)
    """Of each graph, in the order of forward's arguments."""
    copies: bool = False
    """Whether arguments are copied: an optimizer steps the weights before they are looked at."""

    def watch(self, graph: str, half: str, recorded: RecordedHalf, run: Compiled) -> Compiled:
        """Return ``run``, but its arguments are kept alive."""
        self.graphs.setdefault(graph, {})[half] = recorded

        def call(args: list[Any]) -> Any:
            recorded.args = tuple(a.detach().clone() if self.copies and isinstance(a, Tensor) else a for a in args)
            return run(args)

        return compat.boxed(call)
