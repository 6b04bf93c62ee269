"""Claims of a paper, and what a measurement says of them.

A difference is taken seed by seed. It is shown where it is larger than twice its standard error; a deterministic
measurement has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from benchmarks.papers.found import Found, number

State = Literal["holds", "not shown", "fails"]
STATES: tuple[State, ...] = ("holds", "not shown", "fails")


@dataclass(frozen=True)
class Verdict:
    """What became of a claim, and the figures that say so."""

    state: State
    detail: str = ""


Predicate = Callable[[Found], Verdict]


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, with its figure, and how it is judged."""

    text: str
    judge: Predicate
    why: str = ""
    """Where it does not hold: why, as far as is known, and what was tried."""

    @property
    def sentence(self) -> str:
        """The text with a capital."""
        return self.text[:1].upper() + self.text[1:]


def exactly(is_true: bool, detail: str = "") -> Verdict:
    """Holds or fails: for what is not random."""
    return Verdict("holds" if is_true else "fails", detail)


def together(*verdicts: Verdict) -> Verdict:
    """The worst of several, with all their figures."""
    worst = max(verdicts, key=lambda v: STATES.index(v.state))
    return Verdict(worst.state, "; ".join(v.detail for v in verdicts if v.detail))


def lower(ours: str, theirs: str, column: str) -> Predicate:
    """Row ``ours`` has the lower ``column`` (a loss, an error)."""
    return lambda found: _ordered(found, ours, theirs, column, -1.0)


def higher(ours: str, theirs: str, column: str) -> Predicate:
    """Row ``ours`` has the higher ``column`` (an accuracy)."""
    return lambda found: _ordered(found, ours, theirs, column, 1.0)


def no_worse(ours: str, theirs: str, column: str, margin: float, *, is_loss: bool) -> Predicate:
    """Row ``ours`` is worse than ``theirs`` by at most ``margin``; not shown where the noise is larger than that."""
    sign = -1.0 if is_loss else 1.0

    def judge(found: Found) -> Verdict:
        lost = _diverged(found, ours, theirs, column)
        if lost is not None:
            return lost
        mean, error = difference(found, ours, theirs, column)
        gained = sign * mean
        detail = f"{ours} - {theirs}: {_signed(mean)} ± {number(2 * error)} (margin {number(margin)})"
        if gained - 2 * error >= -margin:
            return Verdict("holds", detail)
        return Verdict("fails" if gained + 2 * error < -margin else "not shown", detail)

    return judge


def none_worse(pairs: Sequence[tuple[str, str]], column: str, margin: float, *, is_loss: bool) -> Predicate:
    """`no_worse` of every pair (ours, theirs)."""
    return lambda found: together(*(no_worse(a, b, column, margin, is_loss=is_loss)(found) for a, b in pairs))


def most(parts: dict[str, Verdict], at_least: int) -> Verdict:
    """Holds where ``at_least`` of the parts do; fails where that can no longer be. The figures are those of the rest."""
    states = [v.state for v in parts.values()]
    rest = [
        f"{name} {v.state}: {v.detail.removeprefix(f'{name}, ')}" for name, v in parts.items() if v.state != "holds"
    ]
    detail = "; ".join([f"{states.count('holds')} of {len(states)}", *rest])
    if states.count("holds") >= at_least:
        return Verdict("holds", detail)
    return Verdict("fails" if len(states) - states.count("fails") < at_least else "not shown", detail)


def difference(found: Found, a: str, b: str, column: str) -> tuple[float, float]:
    """Mean of a - b over seeds where both are finite, and its standard error."""
    pairs = found.pairs(a, b, column)
    return mean_and_error([x - y for x, y in pairs if math.isfinite(x) and math.isfinite(y)])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error; no error for one value."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return fmean(values), error


def _ordered(found: Found, ours: str, theirs: str, column: str, sign: float) -> Verdict:
    lost = _diverged(found, ours, theirs, column)
    if lost is not None:
        return lost
    mean, error = difference(found, ours, theirs, column)
    detail = f"{ours} - {theirs}: {_signed(mean)} ± {number(2 * error)}"
    if abs(mean) <= 2 * error or mean == 0:
        return Verdict("not shown", detail)
    return Verdict("holds" if sign * mean > 0 else "fails", detail)


def _diverged(found: Found, ours: str, theirs: str, column: str) -> Verdict | None:
    """A verdict by the count of diverged runs, where it differs or leaves no pair to compare."""
    pairs = found.pairs(ours, theirs, column)
    mine = sum(not math.isfinite(x) for x, _ in pairs)
    other = sum(not math.isfinite(y) for _, y in pairs)
    detail = f"diverged: {ours} {mine}, {theirs} {other} of {len(pairs)}"
    if mine != other:
        return Verdict("holds" if mine < other else "fails", detail)
    if not any(math.isfinite(x) and math.isfinite(y) for x, y in pairs):
        return Verdict("not shown", detail)
    return None


def _signed(value: float) -> str:
    return ("+" if value >= 0 else "") + number(value)
