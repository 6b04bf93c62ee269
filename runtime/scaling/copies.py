"""Keep the scales of stored copies while training runs: each scale fits its own tensor, independent of the others.

A copy is scaled up to an eighth of the format's largest number, so that channels, rows and batches of small numbers
beside large ones are stored as exactly as the format can. It is scaled down, by `DOWN_EXP` binades at most, once any
element has overflowed without a scale. Tensors that are still too large, or too large in many elements, are promoted
(`fxprec.runtime.controller`). On a CPU amax is read from the stored codes. So an overflow does not show how far it
goes, and the scale of a copy that is all zero is raised by as much as cannot overflow, until an element shows or
`MAX_COPY_EXP` is reached.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxprec.numerics.formats import Format, parse
from fxprec.plan.scales import DOWN_EXP, ScaleGraph
from fxprec.runtime.scaling.estimates import floor_log2
from fxprec.runtime.scaling.keeper import AT_ONCE_ABOVE
from fxprec.runtime.scaling.solver import HEADROOM_EXP
from fxprec.runtime.stats import SiteStats

RECENT = 8  # latest steps whose largest magnitude decides
MAX_COPY_EXP = 60
LOOK_AGAIN = 100
"""Steps after which scales are tried again for a tensor that was 0 at all scales."""
LOWERED_EXP = 8
"""Least number of binades by which an overflowing copy's scale is lowered, because its true amax is not known."""
SLACK_EXP = 2
"""Binades by which a scale may be too small before it changes."""
WIDE_EXP = 12
"""Least number of binades of normal numbers in a format that can spare `DOWN_EXP` of them."""
_SAVED = ("exp", "was", "since", "empty_since", "floor")


@dataclass
class _Copy:
    """State of one copy: ``exp`` is its exponent from step ``since`` on, ``was`` the exponent before."""

    format: Format
    exp: int = 0
    was: int = 0
    since: int = 0
    """The first step with exponent ``exp``."""
    empty_since: int | None = None
    """The step at which the copy was found to be 0 at all scales."""
    floor: int = 0
    """The exponent of a copy that needs no larger one: 0, or -`DOWN_EXP` once it has overflowed."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def note(self, stats: SiteStats, step: int, at_once_above: float) -> None:
        """Choose the exponent of later steps, if the statistics were taken under the present one."""
        if step < self.since or not math.isfinite(stats.amax):
            return
        if stats.overflow_ratio >= at_once_above and self.exp > 0:
            self.recent.clear()
            self.exp = max(self.floor, min(self.exp - LOWERED_EXP, self._fitting(stats.amax)))
        elif stats.overflow_ratio and self.exp <= 0 and self._has_room_below():
            self.recent.clear()
            self.exp = self.floor = -DOWN_EXP
        elif stats.amax:
            self.empty_since = None
            if math.ldexp(stats.amax, self.exp) >= self.format.smallest_normal:  # a subnormal amax is too coarse
                self.recent.append(stats.amax)
            self.exp = self._settled(max(self.recent, default=stats.amax))
        elif stats.underflow_ratio != 0:  # 0: the tensor itself is all zero; NaN: not known
            self.exp = self._searched(step)

    def _fitting(self, amax: float) -> int:
        """Return the exponent that leaves the largest magnitude `HEADROOM_EXP` binades to grow."""
        return floor_log2(self.format.largest) - HEADROOM_EXP - floor_log2(amax)

    def _has_room_below(self) -> bool:
        return floor_log2(self.format.largest) - floor_log2(self.format.smallest_normal) >= WIDE_EXP

    def _settled(self, amax: float) -> int:
        """Return the present exponent if it is at most `SLACK_EXP` below one that fits, else one that fits."""
        fitting = max(self.floor, min(self._fitting(amax), MAX_COPY_EXP))
        return self.exp if self.floor <= self.exp and 0 <= fitting - self.exp <= SLACK_EXP else fitting

    def _searched(self, step: int) -> int:
        """Return the exponent to try next for a copy whose elements are all stored as 0."""
        if self.empty_since is not None and step - self.empty_since < LOOK_AGAIN:
            return self.floor
        if self.exp >= MAX_COPY_EXP:
            self.empty_since = step
            return self.floor
        safe = self._fitting(self.format.smallest_subnormal)  # elements stored as 0 are smaller
        return min(self.exp + safe, MAX_COPY_EXP)


class CopyScales:
    """The exponents of a graph's scaled copies."""

    def __init__(self, graph: ScaleGraph, at_once_above: float | None = None) -> None:
        """Start with exponents 0. Overflow of a share ``at_once_above`` of a copy lowers its scale; None: 0.01."""
        self.graph = graph
        self._by_row = {copy.row: _Copy(parse(copy.format)) for copy in graph.copies}
        self._at_once_above = AT_ONCE_ABOVE if at_once_above is None else at_once_above

    @property
    def exps(self) -> tuple[int, ...]:
        """Return the exponents, in the order of the copies."""
        return tuple(copy.exp for copy in self._by_row.values())

    def __contains__(self, row: int) -> bool:
        return row in self._by_row

    def of(self, row: int) -> int:
        """Return the exponent of a row."""
        return self._by_row[row].exp

    def at(self, row: int, step: int) -> int:
        """Return the exponent of a row in that step; 0 for a row without a scale."""
        copy = self._by_row.get(row)
        if copy is None:
            return 0
        return copy.exp if step >= copy.since else copy.was

    def note(self, arrived: Iterable[SiteStats], step: int, now: int) -> list[tuple[int, int, int]]:
        """Take statistics of a step; return (row, old, new exponent) of each copy whose scale step ``now`` changes."""
        moved = []
        for stats in arrived:
            copy = self._by_row.get(stats.site)
            if copy is None:
                continue
            was = copy.exp
            copy.note(stats, step, self._at_once_above)
            if copy.exp != was:
                copy.was, copy.since = was, now
                moved.append((stats.site, was, copy.exp))
        return moved

    def take_from(self, other: CopyScales) -> None:
        """Take over the state of rows that ``other`` has in the same format."""
        for row, copy in self._by_row.items():
            known = other._by_row.get(row)
            if known is not None and known.format == copy.format:
                self._by_row[row] = known

    def begin_with(self, exps: Mapping[int, int]) -> None:
        """Start copies without statistics with these exponents, by row."""
        for row, copy in self._by_row.items():
            if not (copy.recent or copy.since):
                copy.exp = copy.was = exps.get(row, copy.exp)
                copy.floor = min(copy.exp, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all rows that have any, as plain JSON data."""
        return {
            str(row): {name: getattr(c, name) for name in _SAVED} | {"recent": list(c.recent)}
            for row, c in self._by_row.items()
            if c.recent or c.exp or c.since
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`; rows that it lacks start anew."""
        for row, copy in self._by_row.items():
            saved = state.get(str(row), {"recent": ()})
            known = {name: saved[name] for name in _SAVED if name in saved}
            self._by_row[row] = _Copy(copy.format, **known, recent=deque(saved["recent"], RECENT))
