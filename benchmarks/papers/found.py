"""What a table measured: rows and columns over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

Row = tuple[str, Mapping[str, Any]]
"""A row's name, and its figures by column."""


@dataclass(frozen=True)
class Found:
    """Figures by seed, row and column."""

    seeds: Mapping[int, Mapping[str, Mapping[str, Any]]]

    @property
    def rows(self) -> list[str]:
        """Names of rows, as they were measured."""
        return list(dict.fromkeys(name for rows in self.seeds.values() for name in rows))

    @property
    def columns(self) -> list[str]:
        """Names of columns that hold a number or a text."""
        cells = [row for rows in self.seeds.values() for row in rows.values()]
        return list(dict.fromkeys(name for row in cells for name, v in row.items() if not isinstance(v, list)))

    def samples(self, row: str, column: str) -> list[Any]:
        """One value for each seed that has the cell. Raises KeyError where none has."""
        values = self._values(row, column)
        if not values:
            raise KeyError(f"no {column!r} of {row!r}")
        return values

    def pairs(self, a: str, b: str, column: str) -> list[tuple[Any, Any]]:
        """The values of two rows, for each seed that has both. Raises KeyError where none has."""
        for row in (a, b):
            self.samples(row, column)
        both = [rows for rows in self.seeds.values() if column in rows.get(a, {}) and column in rows.get(b, {})]
        if not both:
            raise KeyError(f"no seed with {column!r} of both {a!r} and {b!r}")
        return [(rows[a][column], rows[b][column]) for rows in both]

    def _values(self, row: str, column: str) -> list[Any]:
        return [rows[row][column] for rows in self.seeds.values() if column in rows.get(row, {})]

    def mean(self, row: str, column: str) -> float:
        """Mean over seeds; NaN where a run diverged. Raises KeyError where nothing was measured."""
        return fmean(self.samples(row, column))

    def curve(self, row: str, column: str) -> list[float]:
        """A column of lists, mean over seeds."""
        return [fmean(at) for at in zip(*self.samples(row, column), strict=True)]

    def text(self, row: str, column: str) -> str:
        """The cell as ``mean ± sd``, a text as it is, and "" for none."""
        values = self._values(row, column)
        if not values or isinstance(values[0], str):
            return " / ".join(dict.fromkeys(map(str, values)))
        lost = sum(not math.isfinite(v) for v in values)
        finite = [v for v in values if math.isfinite(v)]
        shown = spread(finite) if finite else ""
        return " ".join(filter(None, [shown, f"({lost} of {len(values)} diverged)" if lost else ""]))


def number(value: Any) -> str:
    """Four significant digits."""
    if isinstance(value, (str, bool)):
        return str(value)
    if isinstance(value, int) or (value == round(value) and 1 <= abs(value) < 1e9):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def spread(values: Sequence[float]) -> str:
    """``mean ± standard deviation``, the mean to the digits that the deviation leaves."""
    mean = fmean(values)
    deviation = stdev(values) if len(values) > 1 else 0.0
    if deviation == 0:
        return number(mean)
    digits = max(0, 1 - math.floor(math.log10(deviation)))
    if digits > 6:
        return f"{mean:.4g} ± {deviation:.1g}"
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"
