"""Find the sizes within the guards for which a decision made at the traced sizes holds.

A group's elements and the bytes saved for backward are expressions in the dynamic dimensions. The expressions are
evaluated along each dimension, at the ends of its range and at points between. If two neighbouring points disagree,
bisection finds the size at which the answer changes. Two changes between neighbouring points are not found; above 64,
neighbouring points are at most a quarter apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import sympy
import torch
from sympy import Symbol
from torch.fx import Graph

from fxprec.passes.analysis.tensors import CountedTensor

# torch ends an unbounded range at least this far from 0. An int that is no tensor's size has an unbounded range.
_UNBOUNDED = 2**48
# The largest number of pairs of groups with a note of their own.
MAX_NOTES = 8
_POINTS = (*range(65), *(step << doubling for doubling in range(4, 46) for step in range(5, 9)))


@dataclass(frozen=True, slots=True)
class Range:
    """The sizes that the guards allow for a dimension, and its traced size."""

    least: int
    most: int | None
    traced: int

    @property
    def ends(self) -> tuple[int, int]:
        """Return the least and the largest size; `_UNBOUNDED` if there is no largest."""
        return self.least, _UNBOUNDED if self.most is None else self.most

    def points(self) -> list[int]:
        """Return the sizes to try, in order."""
        least, most = self.ends
        between = (n for point in _POINTS for n in (-point, point) if least < n < most)
        return sorted({least, self.traced, *between, most})


Ranges = Mapping[Symbol, Range]
Interval = tuple[int, int | None]
_Holds = Callable[..., bool]


def ranges_of(graph: Graph) -> Ranges:
    """Return the range of each symbol that is an int input or a size of an input."""
    found: dict[Symbol, Range] = {}
    for node in graph.find_nodes(op="placeholder"):
        val = node.meta.get("val")
        sizes = val.shape if isinstance(val, torch.Tensor) else (val,)
        for size in sizes:
            if not isinstance(size, torch.SymInt) or not isinstance(size.node.expr, Symbol):
                continue
            if isinstance(size.node.hint, int):  # a jagged dimension has a tensor of lengths instead
                environment = size.node.shape_env
                assert environment is not None, "a symbol belongs to what made it"
                bounds = environment.var_to_range[size.node.expr]
                least = int(bounds.lower) if bounds.lower > -_UNBOUNDED else -_UNBOUNDED
                most = int(bounds.upper) if bounds.upper < _UNBOUNDED else None
                found[size.node.expr] = Range(least, most, int(size.node.hint))
    return found


def order_notes(
    order: Sequence[int], groups: Mapping[int, Sequence[CountedTensor]], ranges: Ranges, *, ascending: bool = False
) -> list[str]:
    """Return a note for each pair of neighbours in ``order`` whose order differs at other sizes within the guards.

    ``order`` goes from the largest group to the smallest (``ascending``: from the smallest to the largest). Comparing
    neighbours is enough: if the order of each pair holds, the whole order holds.
    """
    ranges = used_in((t.size for g in order for t in groups[g]), ranges)
    if not ranges:
        return []
    sizes = {g: sympy.Add(*(t.size for t in groups[g])) for g in order}
    is_what = "smaller" if ascending else "larger"
    notes, undecided = [], 0
    for first, second in pairwise(order):
        wrong = sizes[first] - sizes[second] if ascending else sizes[second] - sizes[first]
        value = evaluated(wrong, ranges)
        found = {} if value is None else _along(lambda *at, value=value: value(*at) > 0, ranges)
        flips = {symbol: tried for symbol, tried in found.items() if tried[0]}
        undecided += value is None or (not flips and any(map(any, found.values())))
        pair = " and ".join(map(str, sorted((first, second))))
        for symbol, tried in flips.items():
            where = _text(symbol, tried, ranges)
            notes.append(f"order of groups {pair} depends on {symbol}: group {second} is {is_what} {where}")
    if len(notes) > MAX_NOTES:
        notes[MAX_NOTES:] = [f"so does the order of {len(notes) - MAX_NOTES} more pairs of groups"]
    if undecided:
        notes.append(f"order of {undecided} pairs of groups is that of the traced sizes: {traced(ranges)}")
    return notes


@dataclass(frozen=True, slots=True)
class BudgetNote:
    """The sizes for which a budget holds."""

    text: str
    is_broken: bool
    """Whether the guards have a largest size, and the budget does not hold for all sizes."""


def budget_note(budget: int, shown: str, size: sympy.Expr, ranges: Ranges) -> BudgetNote | None:
    """Return a note of the sizes for which ``size`` bytes fit into ``budget``; None if they always fit.

    ``shown`` is the budget as text.
    """
    ranges = used_in([size], ranges)
    where = where_all_fit(sympy.Tuple(size), budget, ranges)
    if where is None:
        return BudgetNote(f"activation_budget {shown} holds at the traced sizes: {traced(ranges)}", False)
    has_largest = all(r.most is not None for r in ranges.values())
    return BudgetNote(f"activation_budget {shown} holds {where}", has_largest) if where else None


def where_all_fit(live: sympy.Tuple, room: int, ranges: Ranges) -> str | None:
    """Return the sizes, as text, for which no value in ``live`` exceeds ``room``: "" for all, None if unknown.

    With several dimensions, the text has a part for each dimension, with the other dimensions as traced.
    """
    ranges = used_in([live], ranges)
    if not ranges:
        return ""
    values = evaluated(live, ranges)
    if values is None:
        return None

    found = _along(lambda *at: max(values(*at)) <= room, ranges)
    if all(stretches == [(ranges[s].least, ranges[s].most)] for s, tried in found.items() for stretches in tried):
        return ""
    return "; ".join(_text(symbol, tried, ranges) for symbol, tried in found.items())


def used_in(sizes: Iterable[sympy.Basic], ranges: Ranges) -> Ranges:
    """Return the ranges of the symbols that occur in ``sizes``."""
    used = {symbol for size in dict.fromkeys(sizes) for symbol in size.free_symbols}
    return {s: r for s, r in ranges.items() if s in used}


def traced(ranges: Ranges) -> str:
    """Return the traced sizes as text."""
    return ", ".join(f"{s} = {ranges[s].traced}" for s in _sorted(ranges))


def _sorted(ranges: Ranges) -> list[Symbol]:
    return sorted(ranges, key=str)


def evaluated(size: sympy.Basic, ranges: Ranges) -> Callable[..., Any] | None:
    """Return a function of the symbols' values, ordered by symbol name; None if a symbol in ``size`` has no range."""
    if not size.free_symbols <= ranges.keys():
        return None
    own = {type(part).__name__: type(part) for part in sympy.preorder_traversal(size)}  # torch's FloorDiv and others
    found: Callable[..., Any] = sympy.lambdify(_sorted(ranges), size, modules=[own, "math"])
    return found


def _along(holds: _Holds, ranges: Ranges) -> dict[Symbol, list[list[Interval]]]:
    """Return for each symbol where ``holds`` is true: with the other symbols as traced, then at each of their ends."""
    symbols, found = _sorted(ranges), dict[Symbol, list[list[Interval]]]()
    for place, symbol in enumerate(symbols):
        ends = product(*((0,) if s is symbol else ranges[s].ends for s in symbols))
        others = [tuple(ranges[s].traced for s in symbols), *(ends if len(symbols) > 1 else ())]
        found[symbol] = [_where(partial(_placed, holds, at, place), ranges[symbol]) for at in others]
    return found


def _placed(holds: _Holds, at: Sequence[int], place: int, n: int) -> bool:
    return holds(*at[:place], n, *at[place + 1 :])


def _where(holds: Callable[[int], bool], sizes: Range) -> list[Interval]:
    """Return the sizes for which ``holds`` is true, as intervals in order."""
    known = [(n, holds(n)) for n in sizes.points()]
    turns = [_turn(holds, low, high) for (low, before), (high, after) in pairwise(known) if before != after]
    starts, ends = [sizes.least, *turns], [*(turn - 1 for turn in turns), sizes.most]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if holds(start)]


def _turn(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the first size after ``low`` at which ``holds`` has its value at ``high``."""
    between, before = range(low + 1, high + 1), holds(low)
    return between[bisect_left(between, True, key=lambda n: holds(n) != before)]


def _text(symbol: Symbol, tried: Sequence[Sequence[Interval]], ranges: Ranges) -> str:
    """Return ``"from s0 = 128 on"``, ``"up to s0 = 63"``, both, or a range, and at which other sizes."""
    parts = []
    for start, end in tried[0]:
        if end == ranges[symbol].most:
            parts.append(f"from {symbol} = {start} on")
        elif start == ranges[symbol].least:
            parts.append(f"up to {symbol} = {end}")
        else:
            parts.append(f"from {symbol} = {start} to {end}" if start != end else f"at {symbol} = {start}")
    is_same = all(stretches == tried[0] for stretches in tried)
    given = "" if is_same else f" where {traced({s: r for s, r in ranges.items() if s is not symbol})}"
    return (" and ".join(parts) or "nowhere") + given
