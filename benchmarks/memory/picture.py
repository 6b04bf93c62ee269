"""Peak against step time, one panel a network, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.memory.sides import SIDES

WIDTH, HEIGHT, LEFT, TOP = 460, 340, 55, 40
OURS, OTHERS = "#c0392b", "#34495e"


def draw(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the picture of ``rows``; below and to the left is better."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "peak_mb" in row:
            panels.setdefault(row["network"], []).append(row)
    body = [part for i, (name, found) in enumerate(panels.items()) for part in _panel(name, found, i * WIDTH)]
    size = f"{WIDTH * max(len(panels), 1)} {HEIGHT}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="10">',
            f'<rect width="100%" height="100%" fill="white"/>{"".join(body)}',
            "</svg>\n",
        ]
    )


def _panel(name: str, rows: Sequence[Mapping[str, Any]], offset: int) -> list[str]:
    across, up = WIDTH - LEFT - 20, HEIGHT - TOP - 50
    most_ms, most_mb = (1.1 * max(row[key] for row in rows) for key in ("step_ms", "peak_mb"))
    x0, y0 = offset + LEFT, TOP + up
    parts = [
        f'<text x="{x0}" y="20" font-size="13">{escape(name)}: {escape(rows[0]["shape"])}</text>',
        f'<path d="M{x0} {TOP}V{y0}H{x0 + across}" fill="none" stroke="#999"/>',
        f'<text x="{x0 + across}" y="{y0 + 30}" text-anchor="end">step, ms of processor time</text>',
        f'<text x="{x0 - 5}" y="{TOP - 6}" text-anchor="end">peak, MB</text>',
    ]
    for i in range(6):
        x, y = x0 + across * i / 5, y0 - up * i / 5
        parts.append(f'<text x="{x:.0f}" y="{y0 + 14}" text-anchor="middle">{most_ms * i / 5:.0f}</text>')
        parts.append(f'<text x="{x0 - 5}" y="{y + 3:.0f}" text-anchor="end">{most_mb * i / 5:.0f}</text>')
    taken: list[float] = []
    for row in sorted(rows, key=lambda r: -r["peak_mb"]):
        x, y = x0 + across * row["step_ms"] / most_ms, y0 - up * row["peak_mb"] / most_mb
        colour = OURS if SIDES[row["side"]].is_ours else OTHERS
        label = max([y + 3, *(other + 11 for other in taken if abs(other - y) < 60)])
        taken.append(label)
        is_right = x > x0 + 0.6 * across
        at, anchor = (x - 6, "end") if is_right else (x + 6, "start")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
        parts.append(
            f'<text x="{at:.1f}" y="{label:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(row["side"])}</text>'
        )
    return parts
