"""Write the comparison of two runs as one self-contained page: it fetches nothing and inserts every name as text."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fxprec.report.compare_text import first_of, where
from fxprec.report.history import thinned
from fxprec.report.html import framed
from fxprec.report.result import plain
from fxprec.report.runs import HALVES, Half, Track

if TYPE_CHECKING:
    from fxprec.report.streams import Comparison, Pair

SCRIPTS = ("dom.js", "charts.js", "tables.js", "compare.js")
MAX_POINTS = 60_000  # for all tensors together
_SHOWN = 200  # names that only one run has


def page(found: Comparison) -> str:
    """Return the page; the same comparison gives the same bytes."""
    title = html.escape(f"{found.first} and {found.second}")
    return framed("compare.html", "fxprec compare", {"title": title}, SCRIPTS, page_data(found), styles=["compare.css"])


def page_data(found: Comparison) -> dict[str, Any]:
    """Return everything the page shows, as plain JSON data."""
    keep = max(4, MAX_POINTS // max(len(found.pairs), 1) // 3)
    return {
        "first": found.first,
        "second": found.second,
        "bitwise": found.bitwise,
        "tolerance": found.tolerance,
        "steps": list(found.steps),
        "differences": list(found.differences),
        "only": [list(found.only_first[:_SHOWN]), list(found.only_second[:_SHOWN])],
        "halves": [_half(found, half) for half in HALVES],
        "tensors": [_tensor(pair, keep) for pair in found.pairs],
    }


def _half(found: Comparison, half: Half) -> dict[str, object]:
    first = found.first_in(half)
    of_half = [pair for pair in found.pairs if pair.half == half]
    steps = sorted(pair.parting.step for pair in of_half if pair.parting is not None)
    return {
        "half": half,
        "where": where(half),
        "tensors": len(of_half),
        "parted": steps,
        "first": None if first is None else {"index": found.pairs.index(first), "said": first_of(first)},
    }


def _tensor(pair: Pair, keep: int) -> dict[str, object]:
    chosen = thinned(range(len(pair.steps)), keep)
    steps = [pair.steps[i] for i in chosen]
    return pair.to_dict() | {
        "steps": steps,
        "apart": plain([None if (d := pair.apart[i]) is None else _short(d) for i in chosen]),
        "amax": plain([[_short(_amax(track, step)) for step in steps] for track in (pair.ours, pair.theirs)]),
        "hashes": _hashes(pair, steps),
    }


def _amax(track: Track, step: int) -> float:
    point = track.points.get(step)
    return track.dumps[step].amax if point is None else point[0]


def _hashes(pair: Pair, steps: Sequence[int]) -> list[list[str | None]]:
    """Return the hashes of both runs by step, None for a step without one; empty if a run has none."""
    runs: list[Mapping[int, Any]] = [pair.ours.dumps, pair.theirs.dumps]
    if not all(runs):
        return []
    return [[d.hash[:12] if (d := dumps.get(step)) is not None else None for step in steps] for dumps in runs]


def _short(number: float) -> float:
    return float(f"{number:.4g}")
