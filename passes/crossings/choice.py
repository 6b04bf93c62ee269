"""Choose which values to keep, narrow or recompute, so that a step takes the least time within a memory bound.

Which tensors are live at a moment depends on the choice. So bounds are added one by one: choose (`problem`), replay the
step (`replay.Replay`), add a row for each moment above the budget with the live bytes of the replay, and choose again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from fxprec.passes.analysis.replay.replay import Kept, Replay
from fxprec.passes.analysis.ways import Form
from fxprec.passes.budget_part import Bound
from fxprec.passes.crossings.moments import Fit, Moment, Moments
from fxprec.passes.crossings.nearby import Nearby
from fxprec.passes.crossings.problem import EXACT, Problem, Row, Ways

_ROUNDS, _FEW_ROUNDS = 12, 5
_TIGHTER = (0.95, 0.9)
_TRIALS = 5
_PRECISION = 0.01  # relative precision of the least peak
_CHANGES, _MOST_CHANGES = 16, 64  # values that a step of `improved` changes: the first, and any
_ALMOST = 0.95  # share of a bound above which a moment gets a row in `improved`
_FAR = 0.7  # share of the least found peak below which no step was seen to reach
_LOWER = (0.97, 0.93, 0.85, 0.7)  # shares of the least known peak that are tried as bounds


@dataclass
class Chooser:
    """Finds the choice of least time within a bound."""

    problem: Problem
    start: Ways = field(default_factory=dict)
    """A choice to begin from, besides those that the search finds; empty: none."""

    def __post_init__(self) -> None:
        self._moments = Moments(self.problem)
        self._missed = 0.0  # the last peak bound that `within` could not reach
        self._lowest: Fit | None = None  # the choice of least peak found for that bound

    @cached_property
    def unlimited(self) -> Fit:
        """Return the choice of least time."""
        ways = self.problem.solve([])
        assert ways is not None, "what backward needs can be kept"
        return self.replayed(ways)

    @cached_property
    def started(self) -> list[Fit]:
        """Return the choice to begin from, if there is one."""
        return [self.replayed(self.start)] if self.start else []

    def within(self, bound: Bound, known: Fit | None = None) -> Fit | None:
        """Return the fastest choice found within a bound, or None; ``known`` is a choice within the bound."""
        self.problem.effort.renew()
        found = [] if known is None else [known]
        found += self.approach(bound, known=known)
        for share in _TIGHTER:  # a search for a tighter bound may succeed where the search for the bound fails
            if not _within(found, bound):
                found += self.approach(Bound(share * bound.peak, bound.waiting), _FEW_ROUNDS)
        if not _within(found, bound):
            found.append(self.lowered(min(found, key=lambda fit: fit.peak), bound.peak))
        found += (self.lowered(fit, bound.peak) for fit in self.started)
        lowest = min(found, key=lambda fit: fit.peak)
        if not _within(found, bound) and bound.peak > _FAR * lowest.peak:
            found.append(lowest := self.reached(lowest, bound))
        if not _within(found, bound):
            self._missed, self._lowest = bound.peak, lowest
            return None
        return self.improved(min(_within(found, bound), key=lambda fit: fit.seconds), bound)

    def approach(
        self, bound: Bound, rounds: int = _ROUNDS, known: Fit | None = None, gap: float = EXACT
    ) -> Iterator[Fit]:
        """Yield choices under more and more rows, until one is within ``bound`` or the problem has no solution.

        With ``known``, a choice within ``bound``, only choices that take less time are searched.
        """
        fit, short, moments = self.unlimited, 0.0, list[Moment]()
        for _ in range(rounds):
            yield fit
            if fit.excess(bound) <= 0:
                return
            moments += self._moments.above(fit, bound.less(short))
            rows = [moment.row(bound.less(short)) for moment in moments]
            rows += [] if known is None else [self.problem.faster_than(known.seconds)]
            ways = self.problem.solve(rows, gap)
            if ways is None:
                return
            found = self.replayed(ways)
            if found.ways == fit.ways:
                short += found.excess(bound)
            fit = found
        yield fit

    def least(self, known: Fit | None = None) -> Fit:
        """Return the choice of the least peak that a few trials find; ``known`` is one to start from.

        The trials lie between the bound that `within` missed, if any, and the least known peak.
        """
        self.problem.effort.renew()
        fits = [self.unlimited] if known is None else [known, self.narrowed(known)]
        best = min([*fits, *([] if self._lowest is None else [self._lowest])], key=lambda fit: fit.peak)
        low, high = self._missed, float(best.peak)
        for _ in range(_TRIALS):
            if high - low < _PRECISION * high:
                break
            middle = (low + high) / 2
            fits = list(self.approach(Bound(int(middle)), _FEW_ROUNDS))
            best = min(best, *fits, key=lambda fit: fit.peak)
            if best.peak > middle:
                low = middle
            else:
                high = float(best.peak)
        return min((self._deepened(best), *self._deepest), key=lambda fit: (fit.peak, fit.seconds))

    @cached_property
    def _deepest(self) -> list[Fit]:
        return [self._deepened(fit) for fit in self.started]

    def _deepened(self, fit: Fit) -> Fit:
        """Return a choice of lower peak: single changes first, then a search for each share of the peak in turn.

        It has an allowance of its own, so that it finds the same from one start whatever was searched before.
        """
        self.problem.effort.renew()
        best, shares = self.lowered(fit), list(_LOWER)
        while shares:
            found = self.reached(best, Bound(int(shares[0] * best.peak)))
            if found.peak < (1 - _PRECISION / 2) * best.peak:
                best, shares = found, list(_LOWER)
            else:
                shares.pop(0)
        return best

    def reached(self, fit: Fit, bound: Bound) -> Fit:
        """Return a choice with a lower peak, by steps and by single changes in turn, until it is within ``bound``."""
        best = fit
        while best.excess(bound) > 0:
            found = self.lowered(self.improved(best, bound), bound.peak)
            if found.peak >= best.peak:
                break
            best = found
        return best

    def improved(self, fit: Fit, bound: Bound) -> Fit:
        """Return the choice of least peak, or of least time within ``bound``, that is found in steps (`nearby`).

        A step counts if less of the step's live bytes, summed over its moments, is above the bound, or if it takes less
        time. The next may then change twice as many values; else half as many, and the rows of the failure are added.
        """
        best = lowest = fit
        changes, rows = _CHANGES, list(self._rows_near(fit, bound))
        while changes and self.problem.effort.take_step(len(self.problem.columns)):
            ways = Nearby(self.problem, best.ways, changes).best(rows, bound.peak)
            if ways is None or ways == best.ways:
                changes //= 2
                continue
            found = self.replayed(ways)
            lowest = min(lowest, found, key=lambda fit: (max(fit.excess(bound), 0), fit.seconds))
            if (found.above(bound), found.seconds) < (best.above(bound), best.seconds):
                best, changes, rows = found, min(2 * changes, _MOST_CHANGES), list(self._rows_near(found, bound))
            else:
                changes, rows = changes // 2, rows + list(self._rows_near(found, bound))
        return lowest

    def _rows_near(self, fit: Fit, bound: Bound) -> Iterator[Row]:
        almost = Bound(int(_ALMOST * bound.peak), bound.waiting)
        return (moment.row(bound) for moment in self._moments.above(fit, almost, most=40, near=3))

    def lowered(self, fit: Fit, enough: float = 0.0) -> Fit:
        """Return a choice with a lower peak: change the way of values that are kept at the peak, one at a time.

        The largest value is tried first. The search ends when no change lowers the peak, or the peak is at most
        ``enough``. The solver's rows only estimate the live bytes of choices far from the replayed one; this search
        uses replays alone.
        """
        best, effort = fit, self.problem.effort
        while best.peak > enough:
            for ways in self._neighbours(best):
                if not effort.take_replay(len(best.replay.items)):
                    return best
                if (found := self._lower(ways, best.peak)) is not None:
                    best = found
                    break
            else:
                return best
        return best

    def _neighbours(self, fit: Fit) -> Iterator[Ways]:
        """Yield choices that differ in one value that is live at the peak: it is not kept, or kept in another form."""
        live = fit.replay.timeline.live
        top = max(range(len(live)), key=live.__getitem__, default=0)
        kept = {node: way for node, way in fit.ways.items() if isinstance(way, Form)}
        living = [node for node in kept if fit.replay.lives(node, top, recomputed=False)]
        for node in sorted(living, key=lambda n: -self.problem.size(n, kept[n])):
            size = self.problem.size(node, kept[node])
            others = [way for way in self.problem.ways(node) if isinstance(way, Form) and way != kept[node]]
            without = {n: form for n, form in kept.items() if n is not node}
            narrower = [form for form in others if form.is_on_host or self.problem.size(node, form) < size]
            for tried in (without, *(kept | {node: form} for form in narrower)):
                ways = self.problem.completed(tried)
                if ways is not None and ways != fit.ways:
                    yield ways

    def narrowed(self, fit: Fit) -> Fit:
        """Return a choice whose values at the peak have their narrowest forms, as long as that lowers the peak."""
        best = fit
        while True:
            live = best.replay.timeline.live
            top = max(range(len(live)), key=live.__getitem__, default=0)
            ways = dict(best.ways)
            sources = {s for n, way in ways.items() if not isinstance(way, Form) for s in self.problem.sources(n)}
            for node, way in best.ways.items():
                if isinstance(way, Form) and node not in sources and best.replay.lives(node, top, recomputed=False):
                    ways[node] = self.problem.narrowest(node)
            found = self._lower(ways, best.peak)
            if found is None:
                return best
            best = found

    def replayed(self, ways: Ways) -> Fit:
        """Replay a choice; return the choice with the tensors in memory and its seconds."""
        kept = self._kept(ways)
        replay = Replay(self.problem.needs.step, kept)
        self.problem.needs.peaks[frozenset(kept.items())] = replay.peak
        return Fit(replay, ways, sum(self.problem.seconds(node, way) for node, way in ways.items()))

    def _lower(self, ways: Ways, peak: float) -> Fit | None:
        """Replay a choice, unless it was replayed before; return it if its peak is below ``peak``."""
        if self.problem.needs.peaks.get(frozenset(self._kept(ways).items()), 0) >= peak:
            return None
        fit = self.replayed(ways)
        return fit if fit.peak < peak else None

    def _kept(self, ways: Ways) -> Kept:
        needs, inputs = self.problem.needs, self.problem.inputs
        copied_inputs = {node: form for node, form in needs.forced.items() if needs.step.needs_no_saving(node)}
        return copied_inputs | {node: way for node, way in ways.items() if isinstance(way, Form) and node not in inputs}


def _within(fits: Iterable[Fit], bound: Bound) -> list[Fit]:
    return [fit for fit in fits if fit.excess(bound) <= 0]
