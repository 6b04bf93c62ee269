"""Find the tensor that left its range first, from the statistics of the steps, once an inf or a NaN has appeared.

This need not be the first tensor with a NaN: a tensor that overflows, or grows a thousandfold, comes before the tensors
computed from it. Statistics come one or two steps late (`stats.STEPS_LATE`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fxprec.numerics.formats import parse
from fxprec.plan import Site
from fxprec.runtime.stats import SiteStats

WINDOW = 200
"""Steps whose statistics are kept."""
JUMP = 1024.0
"""A tensor has left its range when its amax exceeds the median of its earlier steps by this factor."""
GROWTH = 8.0
"""The same factor at a jump of the loss, when some tensor must have moved."""
LOSES = 0.25
"""Share of underflowing elements, above the usual share, at which a tensor has moved at a jump of the loss."""
OVERFLOWS = 0.01
"""Share of overflowing elements at which a tensor has left its range; the default of ``promote_above``."""
_FEW = 5  # fewer steps do not show the usual magnitudes
_RINGS = 8  # sets of rows that arrive together; recompiled code counts another set
_SHOWN = 4  # steps whose largest magnitudes a message shows


_SAID = {
    "overflow": "left its range",
    "underflow": "lost its small elements",
    "growth": f"grew by a factor of {GROWTH:g} or more",
}


@dataclass(frozen=True)
class Departure:
    """The first tensor that left its range, by step and then in the order of execution."""

    site: Site
    step: int
    """Step since which the tensor has been out of its range."""
    seen_at: int
    """Step in which an inf or a NaN was seen, in this tensor or one after it, or in which the loss jumped."""
    value: str
    """``"inf"``, ``"NaN"``, ``"overflow"``, ``"underflow"`` or ``"growth"``: the tensor's state in ``seen_at``; after a
    jump of the loss, in ``step``."""
    statistics: tuple[tuple[int, float, float, float], ...] = field(repr=False)
    """(step, amax, overflow ratio, underflow ratio) of up to 200 recent steps, oldest first."""
    cause: str = ""
    """The jump of the loss that started the search; ``""``: an inf or a NaN started it."""

    @property
    def detail(self) -> str:
        """Return the departure as one line of text, with the largest magnitudes of the last few steps."""
        when = f"at step {self.step}" if self.step == self.seen_at else f"from step {self.step} on"
        series = ", ".join(f"{amax:.3g}" for _, amax, _, _ in self.statistics[-_SHOWN:])
        what = _SAID.get(self.value) or f"holds {self.value}"
        cause = self.cause or f"an inf or NaN was seen at step {self.seen_at}"
        return (
            f"{what} {when}, first in the order of execution; {cause}; its largest magnitudes in the last steps: "
            f"{series}"
        )


class NonfiniteWatch:
    """Statistics of every row over the last steps, from which the tensor that left its range first is found."""

    def __init__(self, *, gradients: bool, action: Literal["report", "raise"] | None = None) -> None:
        """Watch forward tensors, with ``gradients`` also gradients. A dynamic loss scale makes infs there usual.

        ``action``: the reaction to an inf or a NaN; None records an event without a warning.
        """
        self.action = action
        self._gradients = gradients
        self._rings: dict[tuple[int, ...], _Ring] = {}  # by the rows that arrive together
        self._was_bad = False

    def note(self, step: int, arrived: Sequence[SiteStats], sites: Mapping[int, Site]) -> Departure | None:
        """Add the statistics of a step; return a departure if an inf or a NaN is new, else None. ``sites`` by row."""
        if not arrived:
            return None
        rows = tuple(stats.site for stats in arrived)
        ring = self._rings.pop(rows, None) or _Ring(len(rows))
        self._rings[rows] = ring  # the ring used last is the dict's last
        if len(self._rings) > _RINGS:
            del self._rings[next(iter(self._rings))]
        ring.add(step, arrived)
        bad = any(not math.isfinite(s.amax) and self._is_news(sites[s.site]) for s in arrived)
        is_new, self._was_bad = bad and not self._was_bad, bad
        return self._first(step, (s.site for s in arrived), sites) if is_new else None

    def forget(self) -> None:
        """Drop all statistics: rows mean other tensors from now on, or steps are those of another training."""
        self._rings.clear()
        self._was_bad = False

    def series(self) -> dict[int, tuple[tuple[int, float, float, float], ...]]:
        """Return (step, amax, overflow ratio, underflow ratio) of up to 200 recent steps by row, oldest first."""
        return {row: self._series(row).rows() for row in self._rows}

    @property
    def _rows(self) -> set[int]:
        return {row for rows in self._rings for row in rows}

    def _series(self, row: int) -> _Series:
        """Return the kept statistics of a row, oldest first."""
        found = [
            ring.column(i)
            for rows, ring in self._rings.items()
            if row in rows
            for i in range(len(rows))
            if rows[i] == row
        ]
        table = np.concatenate(found)
        table = table[np.argsort(table[:, 0], kind="stable")]
        # A gradient arrives once for each backward pass of a step; the worst of them counts.
        table = np.maximum.reduceat(table, np.flatnonzero(np.diff(table[:, 0], prepend=-math.inf)))
        return _Series(table[-WINDOW:])

    def first_moved(self, step: int, site_of: Callable[[int], Site], cause: str) -> Departure | None:
        """Return the row that moved first up to ``step``, in which the loss jumped; of equals, the first to run."""
        sites = {row: site_of(row) for row in self._rows}
        series = {row: self._series(row) for row in sites}
        moved = {row: found.moved_by(step) for row, found in series.items()}
        found = [(at[0], sites[row].order, row, at[1]) for row, at in moved.items() if at is not None]
        if not found:
            return None
        start, _, row, value = min(found)
        return Departure(sites[row], start, step, value, series[row].rows(), cause)

    def _is_news(self, site: Site) -> bool:
        return site.direction == "forward" or self._gradients

    def _first(self, seen_at: int, rows: Iterable[int], sites: Mapping[int, Site]) -> Departure:
        """Return the row that has been out of range for longest; of equals, the first to run."""
        series = {row: self._series(row) for row in rows if self._is_news(sites[row])}
        since = {row: found.out_since(_end(sites[row])) for row, found in series.items()}
        found = [(step, sites[row].order, row) for row, step in since.items() if step is not None]
        step, _, row = min(found)
        return Departure(sites[row], step, seen_at, series[row].value, series[row].rows())


def _end(site: Site) -> float:
    """Return the magnitude at which a format saturates, else inf. An inf may have been counted as that number."""
    fmt = parse(site.format)
    return fmt.largest if fmt.overflow == "saturate" else math.inf


def _usual(early: NDArray[np.float64]) -> float:
    known = early[np.isfinite(early)]
    return float(np.median(known)) if len(known) else math.inf


class _Ring:
    """The last `WINDOW` steps of the rows that arrive together, stored by one array assignment per step."""

    def __init__(self, num_rows: int) -> None:
        self._steps = np.zeros(WINDOW)
        self._values = np.zeros((WINDOW, num_rows, 3))
        self._count = 0

    def add(self, step: int, arrived: Sequence[SiteStats]) -> None:
        at = self._count % WINDOW
        self._steps[at] = step
        self._values[at] = [(s.amax, s.overflow_ratio, s.underflow_ratio) for s in arrived]
        self._count += 1

    def column(self, i: int) -> NDArray[np.float64]:
        """Return (step, amax, overflow ratio, underflow ratio) of the i-th row, oldest first."""
        table = np.column_stack([self._steps, self._values[:, i]])
        return table[: self._count] if self._count <= WINDOW else np.roll(table, -(self._count % WINDOW), axis=0)


class _Series:
    """(step, amax, overflow ratio, underflow ratio) of one row, oldest first."""

    def __init__(self, table: NDArray[np.float64]) -> None:
        self._table = table

    def rows(self) -> tuple[tuple[int, float, float, float], ...]:
        return tuple((int(step), *rest) for step, *rest in self._table.tolist())

    @property
    def value(self) -> str:
        """Return the tensor's state in the last step: "NaN" or "inf" if its amax is so, else "overflow"."""
        amax = float(self._table[-1, 1])
        return "NaN" if math.isnan(amax) else "inf" if math.isinf(amax) else "overflow"

    def out_since(self, end: float) -> int | None:
        """Return the step since which the tensor has been out of its range, or at its ``end``.

        None if it is within. Finite values that were out of range from the first kept step on do not count.
        """
        rows = self._table
        amax, finite = rows[:, 1], np.isfinite(rows[:, 1])
        early = amax[: max(len(amax) // 2, 1)]
        usual = float(np.median(early[np.isfinite(early)])) if finite[0] else math.inf
        shown = np.where(finite, amax, 0.0)
        wide = (rows[:, 2] >= OVERFLOWS) | (shown > JUMP * usual) | (shown >= end)
        out = ~finite | wide
        if not out[-1]:
            return None
        if wide[0]:  # out of range from the first kept step on: only non-finite values are news
            out = ~finite
        inside = np.flatnonzero(~out)
        start = int(inside[-1]) + 1 if len(inside) else 0
        return int(rows[start, 0]) if start < len(rows) else None

    def moved_by(self, step: int) -> tuple[int, str] | None:
        """Return the step since which the tensor has been unusual, and how; None if it is not so in ``step``."""
        rows = self._table
        rows = rows[rows[:, 0] <= step]
        if len(rows) < _FEW or rows[-1, 0] != step:
            return None
        amax, over, under = rows[:, 1], rows[:, 2], rows[:, 3]
        usual = [_usual(column[: max(len(rows) // 2, 1)]) for column in (amax, over, under)]
        ways = {
            "NaN": np.isnan(amax),
            "inf": np.isinf(amax),
            "overflow": over >= usual[1] + OVERFLOWS,
            "underflow": under >= usual[2] + LOSES,
            "growth": amax > GROWTH * usual[0],
        }
        out = np.logical_or.reduce(list(ways.values()))
        inside = np.flatnonzero(~out)
        if not out[-1] or not len(inside):
            return None
        start = int(inside[-1]) + 1
        return int(rows[start, 0]), next(name for name, is_so in ways.items() if is_so[start])
