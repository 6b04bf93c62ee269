"""Read ``stats.jsonl`` as series for drawing, thinned to few enough points for a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fxprec.plan.reading import count, exponent, fields_of, integer, number, or_one_of
from fxprec.report.load import json_lines

FILE = "stats.jsonl"
MAX_POINTS = 40_000  # for all rows together: about 1.5 MB in the page
_LONGEST = 200  # points of one row
T = TypeVar("T")


def read_history(path: Path, sites: int) -> list[dict[str, Any]]:
    """Return one series per cast (row): site, steps, log2 of amax, overflow and underflow ratios, scale exponents.

    The list is empty if there is no file. A last line that training has not finished writing is skipped. Raises
    `PlanError` for any other line that `GraphDump.write_stats` cannot have written.
    """
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows_of(path, sites):
        found.setdefault(row["row"], []).append(row)
    keep = max(8, min(_LONGEST, MAX_POINTS // max(len(found), 1)))
    return [_series(row, thinned(lines, keep)) for row, lines in sorted(found.items())]


def rows_of(path: Path, sites: int) -> Iterator[dict[str, Any]]:
    """Yield the checked lines of a file; none if there is no file. Raises `PlanError` as `read_history`."""
    numbers = {"amax": number, "overflow_ratio": number, "underflow_ratio": or_one_of([None], number)}
    rows = {"step": count, "row": count, "site": integer(0, sites - 1, str(sites - 1))}
    checked = fields_of(rows | numbers | {"scale_exponent": or_one_of([None], exponent)}, ("scale_exponent",), None)
    for row in json_lines(path, checked, "statistics of this plan", "dump the model again"):
        yield {"scale_exponent": None} | row | ({"underflow_ratio": math.nan} if row["underflow_ratio"] is None else {})


def thinned(rows: Sequence[T], keep: int) -> Sequence[T]:
    """Return at most ``keep`` rows, evenly spread, the first and the last among them."""
    if len(rows) <= keep:
        return rows
    return [rows[round(i * (len(rows) - 1) / (keep - 1))] for i in range(keep)]


def _series(row: int, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    scales = [line["scale_exponent"] for line in lines]
    return {
        "row": row,
        "site": lines[0]["site"],
        "steps": [line["step"] for line in lines],
        "amax": [_exponent(line["amax"]) for line in lines],
        "overflow": [_ratio(line["overflow_ratio"]) for line in lines],
        "underflow": [_ratio(line["underflow_ratio"]) for line in lines],
        "scale": None if None in scales else scales,
    }


def _exponent(amax: float) -> float | None:
    """Return log2 of the largest magnitude; None for zero, inf and NaN."""
    return round(math.log2(amax), 2) if 0 < amax < math.inf else None


def _ratio(share: float) -> float | None:
    return float(f"{share:.3g}") if math.isfinite(share) else None
