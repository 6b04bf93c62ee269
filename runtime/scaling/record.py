"""Keep recent statistics of one row of the table, and convert them to and from plain data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxprec.runtime.stats import SiteStats, from_plain, to_plain

# Consecutive steps of gross underflow after which the largest magnitude since the last refresh is forgotten.
PATIENCE = 8
HISTORY = 1000  # refreshes remembered per cast

UNSCALED: Mapping[str, object] = {
    "scale_exponent": 0,
    "estimated_underflow": None,
    "estimated_overflow": None,
    "history": [],
}
"""What `Backend.stats` shows of the scale of a row that has none."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """One cast at one refresh: the chosen exponent, and its estimated and measured losses.

    Shares are of the non-zero elements, ``overflow`` of all elements. ``measured_underflow`` and ``overflow`` are those
    of the measured step, at the exponent in force then.
    """

    step: int
    scale_exponent: int
    estimated_underflow: float
    estimated_overflow: float
    measured_underflow: float
    overflow: float


@dataclass
class Record:
    """Recent statistics of a gradient's cast, or of an operand of its GEMM, which uses the first two fields only."""

    measured: SiteStats | None = None
    """The last good measurement."""
    amax: float | None = None
    """Largest magnitude since the last refresh."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=PATIENCE))
    """Largest magnitudes of the last steps."""
    small: int = 0
    """Consecutive steps of gross underflow with an amax far below `peak`."""
    is_fresh: bool = False
    """Whether the cast was measured since the last refresh."""
    margin: int = 0
    """Binades added to the exponent that the model gives."""
    saturating: float | None = None
    """Largest magnitude of a step that overflowed, to act on at once."""
    clipped: int | None = None
    """Binades by which the whole gradient saturated."""
    lost: float | None = None
    """Share of elements lost to over- and underflow, before the first scales."""
    history: deque[Refresh] = field(default_factory=lambda: deque(maxlen=HISTORY))

    @property
    def is_seen(self) -> bool:
        """Return whether a largest magnitude is known."""
        return self.amax is not None or bool(self.recent)

    @property
    def peak(self) -> float:
        """Return the largest magnitude since the last refresh and in the last steps, as steps may alternate losses."""
        return max(self.amax or 0.0, *self.recent, 0.0)

    def note_amax(self, amax: float, *, forget: bool = False) -> None:
        """Add a step's largest magnitude; with ``forget``, drop those before it."""
        self.amax = amax if forget or self.amax is None else max(self.amax, amax)

    def acted_on(self) -> None:
        """Clear what had to be acted on at once, as a step begins."""
        self.saturating = self.clipped = None

    def refreshed(self) -> None:
        """Clear what was seen since the last refresh, after scales were solved."""
        self.is_fresh, self.amax, self.small = False, None, 0


def to_state(records: Mapping[int, Record]) -> dict[str, object]:
    """Return the records without their histories as plain JSON data, by field."""
    rows = sorted(records)

    def by_row(value: Callable[[Record], object]) -> dict[str, object]:
        return {str(row): found for row in rows if (found := value(records[row])) is not None}

    measured = (stats for row in rows if (stats := records[row].measured) is not None)
    return {
        "measured": [to_plain(stats) for stats in measured],
        "amax": by_row(lambda r: r.amax),
        "margins": by_row(lambda r: r.margin or None),
        "saturating": by_row(lambda r: r.saturating),
        "clipped": by_row(lambda r: r.clipped),
        "recent": by_row(lambda r: list(r.recent) or None),
        "small": by_row(lambda r: r.small or None),
        "fresh": [row for row in rows if records[row].is_fresh],
    }


def from_state(state: Mapping[str, Any]) -> dict[int, Record]:
    """Return the records that `to_state` saved; ``clipped``, ``recent`` and ``small`` may be missing in old states."""
    records: dict[int, Record] = {}

    def record(row: object) -> Record:
        return records.setdefault(int(str(row)), Record())

    for stats in state["measured"]:
        record(stats["site"]).measured = from_plain(stats)
    fields = {"amax": "amax", "margins": "margin", "saturating": "saturating", "clipped": "clipped", "small": "small"}
    for key, name in fields.items():
        for row, value in state.get(key, {}).items():
            setattr(record(row), name, value)
    for row, values in state.get("recent", {}).items():
        record(row).recent.extend(values)
    for row in state["fresh"]:
        record(row).is_fresh = True
    return records
