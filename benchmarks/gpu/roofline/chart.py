"""A bar a side: milliseconds of GEMMs, of attention, of memory, and of launches."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu.roofline.count import Counted
from benchmarks.gpu.roofline.minimum import Minimum

_COLOURS = {"GEMMs": "#4477aa", "attention": "#66ccee", "memory": "#ccbb44", "launches": "#ee6677"}
_KINDS = {"gemm": "GEMMs", "attention": "attention", "memory": "memory"}
_LEFT, _WIDTH, _BAR, _STEP, _LAUNCH = 200, 520, 18, 28, 3e-6


def parts(counted: Counted) -> dict[str, float]:
    """Return seconds by what takes them."""
    found = dict.fromkeys(_COLOURS, 0.0)
    for cost in (*counted.forward.costs, *counted.backward.costs):
        found[_KINDS[cost.kind]] += cost.seconds - _LAUNCH
        found["launches"] += _LAUNCH
    return found


def draw(found: Mapping[str, Counted], least: Minimum, title: str) -> str:
    """Return an SVG."""
    longest = max(counted.seconds for counted in found.values())
    height = _STEP * len(found) + 70
    rows = [f'<text x="8" y="20" font-weight="bold">ms a step, {title} (estimate)</text>']
    for i, (name, counted) in enumerate(found.items()):
        y, x = 36 + i * _STEP, float(_LEFT)
        rows.append(f'<text x="8" y="{y + 13}">{name}</text>')
        for kind, seconds in parts(counted).items():
            width = seconds / longest * _WIDTH
            rows.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{_COLOURS[kind]}"/>')
            x += width
        rows.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{counted.seconds * 1e3:.1f}</text>')
    x = _LEFT + least.seconds / longest * _WIDTH
    rows.append(f'<path d="M{x:.1f} 30V{height - 34}" stroke="#222" stroke-dasharray="4 3"/>')
    for i, (kind, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + i * 110
        rows.append(f'<rect x="{x}" y="{height - 24}" width="12" height="12" fill="{colour}"/>')
        rows.append(f'<text x="{x + 17}" y="{height - 14}">{kind}</text>')
    body = "\n".join(rows)
    size = f'width="{_LEFT + _WIDTH + 60}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'
