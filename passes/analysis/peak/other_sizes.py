"""For which sizes a choice keeps its budget under dynamic shapes: what lives at each moment as a polynomial in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from sympy import Poly, Symbol
from torch.fx import Graph

from fxprec.passes.analysis.peak.step import Held
from fxprec.passes.analysis.sizes import Ranges, ranges_of, traced, used_in, where_all_fit
from fxprec.passes.notice import readable


@dataclass
class OtherSizes:
    """The bytes of a step at its highest moments, at any sizes; ``room`` is what they may take."""

    room: int
    ranges: Ranges
    moments: Sequence[sympy.Expr]
    places: Mapping[Symbol, tuple[int, int]]
    """Input, and its dimension, that shows a size."""
    _seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    _worst: int = 0

    def __post_init__(self) -> None:
        self._worst = self.room
        self._symbols = sorted(self.places, key=str)

    def note(self) -> str:
        """Say up to which sizes the budget holds."""
        found = where_all_fit([self.room - moment for moment in self.moments], self.ranges)
        chosen = f"peak budget: chosen at the traced sizes, {traced(self.ranges)}"
        if found is None:
            return f"{chosen}; at which others it holds is not known"
        return f"{chosen}; it holds {found or 'at all that the guards allow'}"

    def excess(self, args: Sequence[Any]) -> str | None:
        """Say that a call's sizes take more than the budget, and more than those before."""
        sizes = tuple(_size(args, *self.places[s]) for s in self._symbols)
        if sizes not in self._seen:
            self._seen[sizes] = self._bytes(sizes)
        if self._seen[sizes] <= self._worst:
            return None
        self._worst = self._seen[sizes]
        shown = ", ".join(f"{s} = {n}" for s, n in zip(self._symbols, sizes, strict=True))
        return f"a step of {shown} is predicted to hold {readable(self._worst)}, above {readable(self.room)}"

    def _bytes(self, sizes: tuple[int, ...]) -> int:
        """Replace symbols, which evaluates torch's own functions (floor divisions of a chunk) too."""
        found = dict(zip(self._symbols, map(sympy.Integer, sizes), strict=True))
        return int(max(math.ceil(moment.xreplace(found)) for moment in self.moments))


def other_sizes(held: Held, graph: Graph, room: int) -> OtherSizes | None:
    """Return what a choice holds at other sizes; None where no size in them is dynamic."""
    moments = held.moments_in_sizes()
    ranges = used_in(moments, ranges_of(graph))
    if not ranges:
        return None
    return OtherSizes(room, ranges, _highest(moments, ranges), _places(graph, ranges))


def _highest(moments: Sequence[sympy.Expr], ranges: Ranges) -> list[sympy.Expr]:
    """Leave out each moment that another exceeds term by term: sizes are positive."""
    symbols = sorted(ranges, key=str)
    polynomials: list[Poly] = []
    others: list[sympy.Expr] = []
    for moment in dict.fromkeys(moments):
        found = moment.as_poly(*symbols)
        if found is None:
            others.append(moment)
        elif not any(_is_below(found, kept) for kept in polynomials):
            polynomials = [*(kept for kept in polynomials if not _is_below(kept, found)), found]
    return [*(p.as_expr() for p in polynomials), *others]


def _is_below(p: Poly, other: Poly) -> bool:
    return all(c >= 0 for c in (other - p).coeffs())


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
