"""What compiled code does with rows of the scale table."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class WatchedRows:
    """Rows by what lowered code does with them."""

    watched: frozenset[int] = frozenset()
    """Their statistics are appended to the outputs."""
    scaled: frozenset[int] = frozenset()
    """Their scale exponent may differ from 0."""
    measured: frozenset[int] = frozenset()
    """Their moments count too, in steps that measure."""
    counted: frozenset[int] = frozenset()
    """They get a histogram."""
    inlines: bool = False
    """Casts without a scale may be part of the loops around them; what they lose is then counted from their codes."""

    def without(self, rows: Collection[int]) -> WatchedRows:
        """Return the same but for the statistics of ``rows``."""
        return replace(self, watched=self.watched - frozenset(rows))
