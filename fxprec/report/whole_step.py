"""Report the memory of a step: weights, optimizer states, gradients, activations, temporaries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fxprec.plan import PeakBytes
from fxprec.plan.rows import WholeStep

HELD = ("weights", "optimizer states", "gradients", "activations", "temporaries")
_LETTERS = "wsgat"
_PARTS = {"gradients": (4,), "activations": (0, 1, 2), "temporaries": (3, 5)}  # positions in `LIVE`
_WIDTH, _HEIGHT = 64, 14


def moments(whole: WholeStep, peak: PeakBytes) -> list[list[int]]:
    """Return the bytes of each part in `HELD` at moments of the step, in order."""
    there = {"weights": whole.weights, "optimizer states": whole.states, "gradients": whole.gradients}
    return [[there.get(name, 0) + sum(row[i] for i in _PARTS.get(name, ())) for name in HELD] for row in peak.live]


def at_the_peak(whole: WholeStep, peak: PeakBytes) -> dict[str, int]:
    """Return the bytes of each part in `HELD` at the step's peak."""
    return dict(zip(HELD, max(moments(whole, peak), key=sum), strict=True))


def picture(whole: WholeStep, peak: PeakBytes, budget: int) -> list[str]:
    """Return lines that draw the moments as columns, stacked in the order of `HELD`, up to the budget."""
    rows = moments(whole, peak)
    width = min(_WIDTH, len(rows))
    cuts = [i * len(rows) // width for i in range(width + 1)]
    columns = [max(rows[a:b], key=sum) for a, b in pairwise(cuts)]
    lines = ["".join(_letter(column, (line + 0.5) * budget / _HEIGHT) for column in columns) for line in range(_HEIGHT)]
    top = f"{'budget':>9} |{'-' * width}"
    legend = ", ".join(f"{letter} {name}" for letter, name in zip(_LETTERS, HELD, strict=True))
    drawn = [f"{'':>9} |{line.rstrip()}" for line in reversed(lines)]
    return [top, *drawn, f"{'':>9} +{'-' * width}", f"{'':>11}forward, then backward: {legend}"]


def _letter(column: Sequence[int], height: float) -> str:
    """Return the letter of the part that reaches a height, or a blank."""
    total = 0
    for letter, size in zip(_LETTERS, column, strict=True):
        total += size
        if height < total:
            return letter
    return " "
