"""Predict bytes and seconds of a step under several budgets, from the least time to about the least peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fxprec.passes.budget_part import Bound
from fxprec.passes.crossings.choice import Chooser
from fxprec.passes.crossings.moments import Fit
from fxprec.passes.crossings.overlap import overlapped
from fxprec.passes.crossings.problem import EXACT, ROUGHLY

_SHARES = (0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
_OF_WAITING = (0.7, 0.45, 0.2)
_ROUNDS = 5
_SHOWN = 7


def curve(choosers: Sequence[Chooser], *, waiting: bool = False) -> tuple[Fit, ...]:
    """Return choices from the highest peak to the lowest; each takes less time than the next.

    They are the best that several choosers find. With ``waiting``, the bytes between the halves count too, and choices
    with fewer of them are among the results.
    """
    gap = EXACT if waiting else ROUGHLY
    found: list[Fit] = []
    for chooser in choosers:
        chooser.problem.effort.renew()
        top = chooser.unlimited
        fits = [top, *chooser.started, *map(chooser.lowered, chooser.started)]
        fits += _descent(chooser, [Bound(share * top.peak) for share in _SHARES], gap)
        if waiting:
            fits += _descent(chooser, [Bound(top.peak, share * top.waiting) for share in _OF_WAITING], gap)
        found += [overlapped(fit, chooser.problem, fit.peak) for fit in fits]
    best = _unbeaten(found, waiting=waiting)
    return best if waiting else _spread(best)


def _descent(chooser: Chooser, bounds: Iterable[Bound], gap: float) -> Iterator[Fit]:
    """Yield every choice found on the way to one bound after the other, until one bound is out of reach.

    Each search starts without the earlier rows, whose estimates for another choice would make the next problem too
    tight.
    """
    for bound in bounds:
        fits = list(chooser.approach(bound, _ROUNDS, gap=gap))
        yield from fits
        if all(fit.excess(bound) > 0 for fit in fits):
            return


def _spread(fits: Sequence[Fit]) -> tuple[Fit, ...]:
    """Return both ends, and between them the choices nearest to equal steps of the peak."""
    high, low = fits[0].peak, fits[-1].peak
    wanted = (high + (low - high) * i / (_SHOWN - 1) for i in range(_SHOWN))
    kept = {min(range(len(fits)), key=lambda i: abs(fits[i].peak - peak)) for peak in wanted}
    return tuple(fits[i] for i in sorted(kept))


def _unbeaten(fits: Iterable[Fit], *, waiting: bool) -> tuple[Fit, ...]:
    """Return the choices that no other choice beats in both time and bytes."""
    kept: list[Fit] = []
    for fit in sorted(fits, key=lambda f: (f.seconds, f.peak, f.waiting)):
        if not any(k.peak <= fit.peak and (not waiting or k.waiting <= fit.waiting) for k in kept):
            kept.append(fit)
    return tuple(sorted(kept, key=lambda f: -f.peak))
