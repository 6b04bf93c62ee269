"""Plain SVG plots: curves, and bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#222222", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 340, 64, 190, 20, 44


def page(width: int, height: int, parts: Sequence[str]) -> str:
    """A white SVG of that size around ``parts``."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>\n"])


def text(x: float, y: float, content: str, anchor: str = "start", **style: object) -> str:
    """One line of text."""
    extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in style.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(content)}</text>'


def curves(
    lines: Mapping[str, Sequence[float]],
    across: str,
    up: str,
    *,
    xs: Sequence[float] | None = None,
    is_log: bool = False,
    is_log_x: bool = False,
) -> str:
    """A line for each name, over ``xs`` (0, 1, 2, ... if left out); values that are not finite are left out."""
    longest = max(len(values) for values in lines.values())
    xs = list(range(longest)) if xs is None else list(xs)
    at_x = _Axis(xs, LEFT, WIDTH - RIGHT, is_log_x)
    shown = [v for values in lines.values() for v in values if math.isfinite(v) and (v > 0 or not is_log)]
    at_y = _Axis(shown, HEIGHT - BOTTOM, TOP, is_log)
    parts = [*_grid(at_x, at_y, across, up)]
    for i, (name, values) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        drawn = zip(xs, values, strict=False)
        points = [f"{at_x(x):.1f},{at_y(v):.1f}" for x, v in drawn if math.isfinite(v) and (v > 0 or not is_log)]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{" ".join(points)}"/>')
        if len(points) < 30:
            marks = (p.split(",") for p in points)
            parts.extend(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in marks)
        parts.append(text(WIDTH - RIGHT + 10, TOP + 14 + 16 * i, name, fill=colour))
    return page(WIDTH, HEIGHT, parts)


def paths(lines: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str) -> str:
    """A line for each name, through points (x, y) of its own; those that are not finite are left out."""
    kept = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in lines.items()}
    at_x = _Axis([x for points in kept.values() for x, _ in points], LEFT, WIDTH - RIGHT, False)
    at_y = _Axis([y for points in kept.values() for _, y in points], HEIGHT - BOTTOM, TOP, False)
    parts = [*_grid(at_x, at_y, across, up)]
    for i, (name, points) in enumerate(kept.items()):
        colour = COLOURS[i % len(COLOURS)]
        drawn = [(at_x(x), at_y(y)) for x, y in points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{joined}"/>')
        parts.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in drawn)
        parts.append(text(WIDTH - RIGHT + 10, TOP + 14 + 16 * i, name, fill=colour))
    return page(WIDTH, HEIGHT, parts)


def bars(groups: Mapping[str, Mapping[str, float]], up: str, *, low: float | None = None) -> str:
    """Groups of bars, one colour for each name within a group; ``low`` is where the axis begins, 0 if left out."""
    names = list(dict.fromkeys(name for bar in groups.values() for name in bar))
    values = [v for bar in groups.values() for v in bar.values() if math.isfinite(v)]
    at_y = _Axis([low or 0.0, *values], HEIGHT - BOTTOM, TOP, False)
    parts = [*_ticks_up(at_y, up)]
    room = (WIDTH - RIGHT - LEFT) / len(groups)
    width = 0.8 * room / len(names)
    for i, (group, bar) in enumerate(groups.items()):
        x0 = LEFT + room * i + 0.1 * room
        parts.append(text(x0 + 0.4 * room, HEIGHT - BOTTOM + 16, group, "middle"))
        for name, value in bar.items():
            if not math.isfinite(value):
                continue
            k = names.index(name)
            y, base = at_y(value), at_y(low or 0.0)
            parts.append(
                f'<rect x="{x0 + width * k:.1f}" y="{min(y, base):.1f}" width="{width:.1f}" '
                f'height="{abs(base - y):.1f}" fill="{COLOURS[k % len(COLOURS)]}"/>'
            )
    for k, name in enumerate(names):
        parts.append(text(WIDTH - RIGHT + 10, TOP + 14 + 16 * k, name, fill=COLOURS[k % len(COLOURS)]))
    return page(WIDTH, HEIGHT, parts)


class _Axis:
    """Values to pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float, is_log: bool) -> None:
        self.is_log, self.start, self.end = is_log, start, end
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if is_log:
            low, high = math.log10(low), math.log10(high)
        self.low, self.high = (low, high) if high > low else (low - 0.5, high + 0.5)

    def __call__(self, value: float) -> float:
        at = math.log10(value) if self.is_log else value
        return self.start + (at - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.is_log and self.high - self.low >= 1:
            first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
            return [10.0**p for p in range(first, last + 1, max(1, (last - first) // 6))]
        span = self.high - self.low
        step = 10.0 ** math.floor(math.log10(span / 4))
        step *= next(m for m in (1, 2, 5, 10) if span / (m * step) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        found = [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [10.0**v for v in found] if self.is_log else found


def _ticks_up(at_y: _Axis, up: str) -> list[str]:
    parts = [text(8, TOP - 7, up)]
    for value in at_y.ticks():
        y = at_y(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 5, y + 4, f"{value:,.6g}", "end"))
    return parts


def _grid(at_x: _Axis, at_y: _Axis, across: str, up: str) -> list[str]:
    parts = _ticks_up(at_y, up)
    for value in at_x.ticks():
        parts.append(text(at_x(value), HEIGHT - BOTTOM + 16, f"{value:,.6g}", "middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, across, "middle"))
    return parts
