"""Sizes under dynamic shapes: what is decided at the traced sizes, and for which of the sizes in the guards it holds.

A group's elements and the bytes saved for backward are polynomials in the dynamic dimensions, nearly always. Two of
them are compared for every integer in the symbols' ranges: a polynomial whose coefficients, seen from the least sizes,
have one sign keeps that sign; in one symbol it changes at its real roots and nowhere else. Factors that all terms share
(the batch, as a rule) are positive and are taken off first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import sympy
import torch
from sympy import Poly, Symbol
from torch.fx import Graph

from fxprec.passes.analysis.tensors import CountedTensor

# Ends this far from 0 are torch's way of saying that there is none: an int that is no tensor's size has neither.
_UNBOUNDED = 2**48
# Pairs of groups that get a note of their own.
MAX_NOTES = 8


@dataclass(frozen=True, slots=True)
class Range:
    """The sizes that the guards allow a dimension to have, and the size it was traced at."""

    least: int
    most: int | None
    traced: int


Ranges = Mapping[Symbol, Range]
Interval = tuple[int, int | None]


def ranges_of(graph: Graph) -> Ranges:
    """Return the symbols that are sizes of a graph's inputs, or ints among them."""
    found: dict[Symbol, Range] = {}
    for node in graph.find_nodes(op="placeholder"):
        val = node.meta.get("val")
        sizes = val.shape if isinstance(val, torch.Tensor) else (val,)
        for size in sizes:
            if not isinstance(size, torch.SymInt) or not isinstance(size.node.expr, Symbol):
                continue
            if isinstance(size.node.hint, int):  # a jagged dimension's stands for a tensor of lengths
                environment: Any = size.node.shape_env
                bounds = environment.var_to_range[size.node.expr]
                least = int(bounds.lower) if bounds.lower > -_UNBOUNDED else -_UNBOUNDED
                most = int(bounds.upper) if bounds.upper < _UNBOUNDED else None
                found[size.node.expr] = Range(least, most, int(size.node.hint))
    return found


def order_notes(
    order: Sequence[int], groups: Mapping[int, Sequence[CountedTensor]], ranges: Ranges, *, ascending: bool = False
) -> list[str]:
    """Say where in the guards another order would be right than that of the traced sizes; nothing where it never is.

    ``order`` goes from the largest group to the smallest (``ascending``: the other way round). Neighbours are compared:
    where each pair's order holds, so does that of all.
    """
    ranges = used_in((t.size for g in order for t in groups[g]), ranges)
    if not ranges:
        return []
    sizes = _polynomials({g: [t.size for t in groups[g]] for g in order}, ranges)
    notes, undecided = [], 0
    for first, second in pairwise(order):
        a, b = sizes[first], sizes[second]
        flips = None if a is None or b is None else _where_positive(a - b if ascending else b - a, ranges)
        if flips is None:
            undecided += 1
        elif flips:
            symbol, where = flips
            is_what = "smaller" if ascending else "larger"
            pair = " and ".join(map(str, sorted((first, second))))
            notes.append(f"order of groups {pair} depends on {symbol}: group {second} is {is_what} {where}")
    if len(notes) > MAX_NOTES:
        notes[MAX_NOTES:] = [f"so does the order of {len(notes) - MAX_NOTES} more pairs of groups"]
    if undecided:
        notes.append(f"order of {undecided} pairs of groups is that of the traced sizes: {_traced(ranges)}")
    return notes


@dataclass(frozen=True, slots=True)
class BudgetNote:
    """Up to where a budget holds."""

    text: str
    is_broken: bool
    """Whether the guards name a largest size, where it does not hold."""


def budget_note(budget: int, shown: str, size: sympy.Expr, ranges: Ranges) -> BudgetNote | None:
    """Say for which sizes ``size`` bytes fit into ``budget``; None where they do for all in the guards.

    ``shown`` is the budget as people read it.
    """
    ranges = used_in([size], ranges)
    if not ranges:
        return None
    (exact,) = _polynomials({0: [size]}, ranges).values()
    bounded = all(ranges[s].most is not None for s in ranges)
    if exact is None:
        return BudgetNote(f"activation_budget {shown} holds at the traced sizes: {_traced(ranges)}", False)
    room = budget - exact
    if _is_nowhere_positive(-room, ranges) or _largest_fits(exact, budget, ranges):
        return None
    along = []
    for symbol in _sorted(ranges):
        others = {s: ranges[s].traced for s in _sorted(ranges) if s is not symbol}
        alone = Poly(room.as_expr().subs(others), symbol)
        where = _text(symbol, _where_not_negative(alone, ranges[symbol]), ranges[symbol])
        given = ", ".join(f"{s} = {n}" for s, n in others.items())
        along.append(f"{where} where {given}" if given else where)
    return BudgetNote(f"activation_budget {shown} holds {'; '.join(along)}", bounded)


def where_all_fit(rooms: Sequence[sympy.Expr], ranges: Ranges) -> str | None:
    """Say for which sizes none of ``rooms`` is negative: "" for all in the guards, None where none can say.

    With several dimensions, along each, the others as they were traced.
    """
    ranges = used_in(rooms, ranges)
    if not ranges:
        return ""
    exact = [room.as_poly(*_sorted(ranges)) for room in rooms]
    known = [p for p in exact if p is not None]
    if len(known) < len(exact):
        return None
    if all(_is_nowhere_positive(-p, ranges) for p in known):
        return ""
    along = []
    for symbol in _sorted(ranges):
        others = {s: ranges[s].traced for s in _sorted(ranges) if s is not symbol}
        alone = [_where_not_negative(Poly(p.as_expr().subs(others), symbol), ranges[symbol]) for p in known]
        where = _text(symbol, reduce(_common, alone), ranges[symbol])
        given = ", ".join(f"{s} = {n}" for s, n in others.items())
        along.append(f"{where} where {given}" if given else where)
    return "; ".join(along)


def _common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return what lies in intervals of both."""
    found: list[Interval] = []
    for first, last in a:
        for start, end in b:
            low, ends = max(first, start), [e for e in (last, end) if e is not None]
            high = min(ends, default=None)
            if high is None or low <= high:
                found.append((low, high))
    return found


def used_in(sizes: Iterable[sympy.Expr], ranges: Ranges) -> Ranges:
    """Return the ranges of the symbols that occur in ``sizes``."""
    used = {symbol for size in dict.fromkeys(sizes) for symbol in size.free_symbols}
    return {s: r for s, r in ranges.items() if s in used}


def _sorted(ranges: Ranges) -> list[Symbol]:
    return sorted(ranges, key=str)


def _traced(ranges: Ranges) -> str:
    return ", ".join(f"{s} = {ranges[s].traced}" for s in _sorted(ranges))


def _polynomials(sizes: Mapping[int, Sequence[sympy.Expr]], ranges: Ranges) -> dict[int, Poly | None]:
    """Return the sums as polynomials in the symbols; None for one that is none."""
    symbols = _sorted(ranges)
    known: dict[sympy.Expr, Poly | None] = {}
    for size in dict.fromkeys(s for several in sizes.values() for s in several):
        found = size.as_poly(*symbols)
        known[size] = found if found is not None and found.domain.is_ZZ else None
    zero = Poly(0, *symbols, domain="ZZ")
    return {key: _sum((known[s] for s in several), zero) for key, several in sizes.items()}


def _sum(parts: Iterable[Poly | None], zero: Poly) -> Poly | None:
    for part in parts:
        if part is None:
            return None
        zero = zero + part
    return zero


def _where_positive(p: Poly, ranges: Ranges) -> tuple[Symbol, str] | tuple[()] | None:
    """Return the symbol and the sizes at which ``p`` is positive: () where it never is, None where none can say."""
    if _is_nowhere_positive(p, ranges):
        return ()
    if all(r.least >= 1 for r in ranges.values()):
        p = p.terms_gcd()[1]
    p = p.exclude()
    if len(p.gens) != 1:
        return None
    (symbol,) = p.gens
    found = _where_not_negative(p - 1, ranges[symbol])
    return (symbol, _text(symbol, found, ranges[symbol])) if found else ()


def _is_nowhere_positive(p: Poly, ranges: Ranges) -> bool:
    """Say whether no coefficient is positive, seen from the least sizes. Not seeing it so proves nothing."""
    seen = Poly(p.as_expr().subs({s: s + ranges[s].least for s in p.gens}, simultaneous=True), *p.gens)
    return all(c <= 0 for c in seen.coeffs())


def _largest_fits(exact: Poly, budget: int, ranges: Ranges) -> bool:
    """Say whether the largest sizes fit; all terms grow."""
    largest = [ranges[s].most for s in exact.gens]
    if None in largest or any(c < 0 for c in exact.coeffs()):
        return False
    return bool(exact(*largest) <= budget)


def _where_not_negative(p: Poly, sizes: Range) -> list[Interval]:
    """Return the integers of a range at which a polynomial in one symbol is at least 0, as intervals in order."""
    starts = sorted(
        {sizes.least, *(n for n in _breaks(p) if sizes.least < n and (sizes.most is None or n <= sizes.most))}
    )
    found: list[Interval] = []
    for start, end in zip(starts, (*(n - 1 for n in starts[1:]), sizes.most), strict=True):
        if p(start) >= 0:
            if found and found[-1][1] == start - 1:
                start = found.pop()[0]
            found.append((start, end))
    return found


def _breaks(p: Poly) -> Iterator[int]:
    """Yield integers next to which the sign changes: roots, with a margin for the last digit of a root."""
    if p.degree() <= 0:
        return
    for root in p.real_roots(multiple=False) if p.degree() > 1 else [(-p.TC() / p.LC(), 1)]:
        near = int(sympy.floor(root[0].evalf(40)))
        yield from range(near - 1, near + 3)


def _text(symbol: Symbol, found: Sequence[Interval], sizes: Range) -> str:
    """Return ``"from s0 = 128 on"``, ``"up to s0 = 63"``, both, or a stretch between."""
    parts = []
    for start, end in found:
        if end == sizes.most:
            parts.append(f"from {symbol} = {start} on")
        elif start == sizes.least:
            parts.append(f"up to {symbol} = {end}")
        else:
            parts.append(f"from {symbol} = {start} to {end}" if start != end else f"at {symbol} = {start}")
    return " and ".join(parts) or "nowhere"
