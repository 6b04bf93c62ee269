"""Find the sizes at which a choice keeps its budget under dynamic shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from sympy import Symbol
from torch.fx import Graph

from fxprec.passes.analysis.replay.replay import Replay
from fxprec.passes.analysis.sizes import Ranges, evaluated, ranges_of, traced, used_in, where_all_fit
from fxprec.passes.notice import readable


@dataclass
class OtherSizes:
    """The live bytes of a step at each moment, as functions of the sizes; ``room`` is the most bytes allowed."""

    room: int
    ranges: Ranges
    moments: sympy.Tuple
    places: Mapping[Symbol, tuple[int, int]]
    """For each size, (an input, the dimension of the input) from which it is read."""
    _seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    _worst: int = 0

    def __post_init__(self) -> None:
        self._worst = self.room
        self._symbols = sorted(self.ranges, key=str)

    def note(self) -> str:
        """Return a note of the sizes for which the budget holds."""
        found = where_all_fit(self.moments, self.room, self.ranges)
        chosen = f"peak budget: chosen at the traced sizes, {traced(self.ranges)}"
        if found is None:
            return f"{chosen}; whether it holds at other sizes is not known"
        return f"{chosen}; it holds {found or 'at all sizes that the guards allow'}"

    def excess(self, args: Sequence[object]) -> str | None:
        """Return a message if a call's sizes exceed the budget by more than all calls before, else None."""
        sizes = tuple(_size(args, *self.places[s]) for s in self._symbols)
        if sizes not in self._seen:
            self._seen[sizes] = 0 if self._live is None else math.ceil(max(self._live(*sizes)))
        if self._seen[sizes] <= self._worst:
            return None
        self._worst = self._seen[sizes]
        shown = ", ".join(f"{s} = {n}" for s, n in zip(self._symbols, sizes, strict=True))
        return f"a step of {shown} is predicted to hold {readable(self._worst)}, above {readable(self.room)}"

    @cached_property
    def _live(self) -> Callable[..., Sequence[float]] | None:
        return evaluated(self.moments, self.ranges)


def other_sizes(replay: Replay, graph: Graph, room: int) -> OtherSizes | None:
    """Return a choice's live bytes at other sizes; None if they depend on no dynamic size."""
    moments = sympy.Tuple(*dict.fromkeys(replay.moments_in_sizes()))
    ranges = used_in([moments], ranges_of(graph))
    return OtherSizes(room, ranges, moments, _places(graph, ranges)) if ranges else None


def _places(graph: Graph, ranges: Ranges) -> Mapping[Symbol, tuple[int, int]]:
    places: dict[Symbol, tuple[int, int]] = {}
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        val = node.meta.get("val")
        for dim, size in enumerate(val.shape if isinstance(val, torch.Tensor) else (val,)):
            if isinstance(size, torch.SymInt) and size.node.expr in ranges:
                places.setdefault(size.node.expr, (i, dim))
    return places


def _size(args: Sequence[Any], position: int, dim: int) -> int:
    arg = args[position]
    return int(arg.shape[dim]) if isinstance(arg, torch.Tensor) else int(arg)
