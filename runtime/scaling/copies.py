"""Keep the scales of stored copies while training runs: each fits its own tensor, whatever the others do.

A copy is scaled up where its largest magnitude lies near the format's small end, and not at all elsewhere: tensors that
are too large are promoted (`fxprec.runtime.controller`). On a CPU magnitudes are known as far as they were stored. So a
copy that is all zero is scaled up by what cannot overflow, until something shows or `MAX_COPY_EXP` is reached.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fxprec.numerics.formats import Format, parse
from fxprec.plan.scales import ScaleGraph
from fxprec.runtime.scaling.estimates import floor_log2
from fxprec.runtime.scaling.keeper import AT_ONCE_ABOVE
from fxprec.runtime.scaling.solver import HEADROOM_EXP
from fxprec.runtime.stats import SiteStats

RECENT = 8  # steps whose largest magnitude counts
MAX_COPY_EXP = 60
LOOK_AGAIN = 100
"""Steps after which a tensor that was 0 at all scales is searched for again."""
LOWERED_EXP = 8
"""Binades by which a copy that overflows is lowered, where its true magnitude is not known."""
_SAVED = ("exp", "was", "since", "empty_since")


@dataclass
class _Copy:
    """What is known of one copy. A scale changes at a step; statistics of the steps before are of the other."""

    format: Format
    exp: int = 0
    was: int = 0
    since: int = 0
    """The first step that ``exp`` is of."""
    empty_since: int | None = None
    """The step at which nothing was found at any scale."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def exp_at(self, step: int) -> int:
        return self.exp if step >= self.since else self.was

    def note(self, stats: SiteStats, step: int, at_once_above: float) -> None:
        """Choose the exponent of the steps to come, if statistics are of the present one."""
        if step < self.since or not math.isfinite(stats.amax):
            return
        if stats.overflow_ratio >= at_once_above and self.exp:
            self.recent.clear()
            self.exp = max(0, min(self.exp - LOWERED_EXP, self._fitting(stats.amax)))
        elif stats.amax:
            self.empty_since = None
            if math.ldexp(stats.amax, self.exp) >= self.format.smallest_normal:  # else it may be less by far
                self.recent.append(stats.amax)
            self.exp = self._settled(max(self.recent, default=stats.amax))
        elif stats.underflow_ratio != 0:  # what was not stored as 0 by the format is 0
            self.exp = self._searched(step)

    def _top(self) -> int:
        return floor_log2(self.format.largest)

    def _fitting(self, amax: float) -> int:
        """Return the exponent that leaves the largest magnitude `HEADROOM_EXP` binades to grow."""
        return self._top() - HEADROOM_EXP - floor_log2(amax)

    def _settled(self, amax: float) -> int:
        """Return the exponent in force where it still fits, with room to grow by 4 a step; 0 where none is needed."""
        fmt = self.format
        enough = min(32 * fmt.smallest_normal, fmt.largest / 64)
        if amax >= (4 * enough if self.exp else enough):
            return 0
        fitting = min(self._fitting(amax), MAX_COPY_EXP)
        return self.exp if 0 < self.exp <= fitting and math.ldexp(amax, self.exp) >= enough else fitting

    def _searched(self, step: int) -> int:
        """Return the exponent at which a copy of zeros may show something."""
        if self.empty_since is not None and step - self.empty_since < LOOK_AGAIN:
            return 0
        if self.exp >= MAX_COPY_EXP:
            self.empty_since = step
            return 0
        safe = self._fitting(self.format.smallest_subnormal)  # what is stored as 0 is smaller
        return min(self.exp + safe, MAX_COPY_EXP)


class CopyScales:
    """The exponents of a graph's scaled copies."""

    def __init__(self, graph: ScaleGraph, at_once_above: float | None = None) -> None:
        """Overflow of a share ``at_once_above`` of a copy's elements lowers its scale; None: 0.01."""
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

    def was_scaled(self, row: int, step: int) -> bool:
        """Say whether a row had a scale in that step."""
        return row in self._by_row and self._by_row[row].exp_at(step) > 0

    def note(self, stats: SiteStats, step: int, now: int) -> tuple[int, int] | None:
        """Take a row's statistics of a step; return its exponent before and after, where step ``now`` changes it."""
        copy = self._by_row[stats.site]
        was = copy.exp
        copy.note(stats, step, self._at_once_above)
        if copy.exp == was:
            return None
        copy.was, copy.since = was, now
        return was, copy.exp

    def take_from(self, other: CopyScales) -> None:
        """Take what another knows of the same rows in the same format."""
        for row, copy in self._by_row.items():
            known = other._by_row.get(row)
            if known is not None and known.format == copy.format:
                self._by_row[row] = known

    def begin_with(self, exps: Mapping[int, int]) -> None:
        """Take the exponents, by row, of copies of which nothing is known yet."""
        for row, copy in self._by_row.items():
            if not (copy.recent or copy.since):
                copy.exp = copy.was = exps.get(row, copy.exp)

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON data: what is known of the rows of which anything is."""
        return {
            str(row): {name: getattr(c, name) for name in _SAVED} | {"recent": list(c.recent)}
            for row, c in self._by_row.items()
            if c.recent or c.exp or c.since
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take `state_dict`'s result; rows that it does not have begin anew."""
        for row, copy in self._by_row.items():
            saved = state.get(str(row), {"recent": ()})
            known = {name: saved[name] for name in _SAVED if name in saved}
            self._by_row[row] = _Copy(copy.format, **known, recent=deque(saved["recent"], RECENT))
