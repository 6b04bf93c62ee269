"""The table: a row an architecture, then median, worst and the worst three of each side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.fidelity.one_step import Row

WORST = 3


def summarise(rows: Sequence[Row], sides: Sequence[str]) -> list[dict[str, Any]]:
    """Return for each side the median and worst of loss error and cosine, names of the worst, and who failed."""
    return [_summary(side, [row for row in rows if row.side == side]) for side in sides]


def _summary(side: str, rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {"side": side, "failed": [row.architecture for row in rows if row.error is not None]}
    whole = [row for row in rows if row.error is None]
    found["architectures"] = len(whole)
    for name, sign in (("loss_error", -1), ("cosine", 1), ("worst_cosine", 1), ("saved_ratio", -1)):
        ordered = sorted((sign * value, row.architecture) for row in whole if (value := getattr(row, name)) is not None)
        if ordered:
            found[name] = {
                "median": sign * statistics.median(value for value, _ in ordered),
                "worst": sign * ordered[0][0],
                "worst_of": [architecture for _, architecture in ordered[:WORST]],
            }
    return found


def lines(rows: Sequence[Row], sides: Sequence[str]) -> list[str]:
    """Return the table as text: ``loss error / cosine`` of each side, then the summaries."""
    width = max(len(row.architecture) for row in rows)
    by_key = {(row.architecture, row.side): row for row in rows}
    table = [" " * width + "".join(f"{side:>21}" for side in sides)]
    for architecture in dict.fromkeys(row.architecture for row in rows):
        cells = (by_key.get((architecture, side)) for side in sides)
        table.append(f"{architecture:{width}}" + "".join(f"{cell(row):>21}" for row in cells))
    return [*table, "", *(_summary_line(found) for found in summarise(rows, sides))]


def cell(row: Row | None) -> str:
    """Return ``loss error / cosine``."""
    if row is None:
        return "-"
    return "failed" if row.error is not None else f"{row.loss_error:.1e} {row.cosine:9.6f}"


def _summary_line(found: dict[str, Any]) -> str:
    text = f"{found['side']:22}"
    if "cosine" in found:
        loss, cosine = found["loss_error"], found["cosine"]
        text += f" loss error {loss['median']:.1e}, worst {loss['worst']:.1e} ({', '.join(loss['worst_of'])});"
        text += f" cosine {cosine['median']:.5f}, worst {cosine['worst']:.5f} ({', '.join(cosine['worst_of'])})"
        if "saved_ratio" in found:
            text += f"; saved {found['saved_ratio']['median']:.3f}x"
    return text + (f"; failed: {', '.join(found['failed'])}" if found["failed"] else "")
