"""Which values to keep, narrow or compute again, so that a step never holds more than a budget: least time first.

Each value of forward that backward needs is there in one of four ways: kept, kept as a low copy, computed again from
what is itself exact, or from what may be rounded. Computing it again asks for its operands. That is a minimum cut but
for the budget, a bound on what lives at each moment, so its relaxation is nearly whole: HiGHS solves that, and then
searches the few fractions that are left.

What lives when depends on the choice. The bounds are made one by one: choose, replay the step (`step.Held`), bound the
moments above the budget by what the replay shows there, choose again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch.fx import Node

from fxprec.passes.analysis.peak.costs import Rates
from fxprec.passes.analysis.peak.kernels import Kind, bytes_of, can_repeat, kind_of
from fxprec.passes.analysis.peak.needs import Needs
from fxprec.passes.analysis.peak.step import Held, Saved

Vector = npt.NDArray[np.float64]
KEEP, NARROW, AGAIN, ROUNDED = range(4)
"""Ways a value is there for backward: kept; kept as a low copy; computed again exactly, or from rounded values."""


@dataclass(frozen=True)
class Fit:
    """A choice, and what it was replayed to hold."""

    held: Held
    ways: Mapping[Node, int]
    seconds: float
    """Predicted, of computing again, rounding and moving."""

    @property
    def peak(self) -> int:
        return self.held.peak


@dataclass(frozen=True)
class Moment:
    """A moment of a step: the bytes of each way of each value that would live then, by column, and all else."""

    bytes: Mapping[int, float]
    base: float


Row = tuple[Mapping[int, float], float, float]  # coefficients by column, least and most of their sum


@dataclass
class Chooser:
    """Finds the choice of least time under a budget."""

    needs: Needs
    rates: Rates
    ways: Collection[str]

    def __post_init__(self) -> None:
        self.nodes = self._closure()
        self.columns = {
            (node, way): column for column, (node, way) in enumerate((n, w) for n in self.nodes for w in self._ways(n))
        }
        self.cost = np.array([self._cost(node, way) for node, way in self.columns])
        self._rows: list[Row] = []
        self._require()
        self._first, self._last = self._wanted_when()

    def _closure(self) -> list[Node]:
        """Return the values that may be asked for in backward, in order."""
        found, stack = set(), [*self.needs.exactly, *self.needs.roughly]
        while stack:
            node = stack.pop()
            if not self.needs.step.is_there(node) and node not in found:
                found.add(node)
                stack += [self.needs.step.shown(n) for n in node.all_input_nodes]
        return [n for n in self.needs.step.forward if n in found]

    def _ways(self, node: Node) -> Iterator[int]:
        if node in self.needs.high:
            yield KEEP
        if node in self.needs.low and "narrow" in self.ways:
            yield NARROW
        if can_repeat(node) and ("recompute" in self.ways or kind_of(node) in _CHEAP):
            yield AGAIN
            yield ROUNDED

    def _cost(self, node: Node, way: int) -> float:
        if way in (AGAIN, ROUNDED):
            return self.rates.again(node) + 1e-9
        size = self._size(node, way)
        return self.rates.keeping(node, size) + (self.rates.rounding(node) if way == NARROW else 0.0) + 1e-9

    def _size(self, node: Node, way: int) -> int:
        return self.needs.size(node, self.needs.low[node] if way == NARROW else self.needs.high[node])

    def _require(self) -> None:
        """Say what must be there, and what computing it again asks for."""
        exact, rough = (KEEP, AGAIN), (KEEP, NARROW, AGAIN, ROUNDED)
        for node in self.nodes:
            self._row(self._sum(node, rough), -np.inf, 1.0)
            if node in self.needs.exactly:
                self._row(self._sum(node, exact), 1.0, np.inf)
            elif node in self.needs.roughly:
                self._row(self._sum(node, rough), 1.0, np.inf)
            for way, wanted in ((AGAIN, exact), (ROUNDED, rough)):
                if (node, way) in self.columns:
                    for source in {self.needs.step.shown(n) for n in node.all_input_nodes}:
                        if not self.needs.step.is_there(source):
                            self._row(self._sum(source, wanted) | {self.columns[node, way]: -1.0}, 0.0, np.inf)

    def _sum(self, node: Node, ways: Collection[int]) -> dict[int, float]:
        return {self.columns[node, way]: 1.0 for way in ways if (node, way) in self.columns}

    def _row(self, entries: dict[int, float], least: float, most: float) -> None:
        self._rows.append((entries, least, most))

    def _wanted_when(self) -> tuple[dict[Node, int], dict[Node, int]]:
        """Return when backward first and last reads a value, by position among backward's nodes; a guess where only
        what is computed again reads it."""
        first: dict[Node, int] = {}
        last: dict[Node, int] = {}
        for position, node in enumerate(self.needs.step.backward):
            for wanted in map(self.needs.step.shown, self.needs.step.wanted_by(node)):
                first.setdefault(wanted, position)
                last[wanted] = position
        for node in reversed(self.nodes):
            for source in {self.needs.step.shown(n) for n in node.all_input_nodes}:
                if node in first:
                    last[source] = max(last.get(source, 0), first[node])
                    if source not in last or source not in first:
                        first[source] = min(first.get(source, first[node]), first[node])
        return first, last

    def unlimited(self) -> Fit:
        """Return the choice of least time."""
        found = self._solve([], 0.0)
        assert found is not None, "what backward needs can be kept"
        return found

    def within(self, budget: int) -> Fit | None:
        """Return a choice that holds ``budget`` bytes at most, of the least time found; or None."""
        fit, moments, target = self.unlimited(), list[Moment](), float(budget)
        for _ in range(_ROUNDS):
            if fit.peak <= budget:
                return fit
            moments += self._moments(fit, target)
            found = self._solve(moments, target)
            if found is None:
                return None
            if found.ways == fit.ways:
                target -= found.peak - budget
            fit = found
        return fit if fit.peak <= budget else None

    def least(self) -> Fit:
        """Return the choice of the least peak that was found, in a few trials."""
        best = self.unlimited()
        low, high = 0.0, float(best.peak)
        for _ in range(_TRIALS):
            middle = (low + high) / 2
            found = self.within(int(middle))
            if found is None:
                low = middle
            else:
                best, high = found, float(found.peak)
        return best

    def _moments(self, fit: Fit, above: float) -> Iterator[Moment]:
        """Yield the moments at which a choice holds most, of those above a bound."""
        live = fit.held.timeline.live
        tops = [p for p in range(len(live)) if live[p] > above and live[p] == max(live[max(p - 8, 0) : p + 9])]
        for time in sorted(tops, key=lambda p: -live[p])[:_MOMENTS]:
            entries = self._living(fit, time)
            chosen = {self.columns[node, way] for node, way in fit.ways.items()}
            yield Moment(entries, live[time] - sum(size for column, size in entries.items() if column in chosen))

    def _living(self, fit: Fit, time: int) -> dict[int, float]:
        """Return the bytes of each way of each value at one time of a replayed step, where it would live there."""
        held, step = fit.held, self.needs.step
        anchor = held.anchors[held.timeline.order[time]]
        is_backward = anchor in step.behind
        moment = self._order[anchor]
        entries: dict[int, float] = {}
        for (node, way), column in self.columns.items():
            if fit.ways.get(node) == way:
                lives = self._lives_now(held, node, way, time)
            elif way in (AGAIN, ROUNDED):
                lives = (
                    is_backward and self._lies(node) and self._first.get(node, -1) <= moment <= self._last.get(node, -1)
                )
            elif is_backward:
                lives = moment <= self._last.get(node, -1)
            else:
                lives = self._order[node] <= moment
            if lives:
                entries[column] = float(bytes_of(node) if way in (AGAIN, ROUNDED) else self._size(node, way))
        return entries

    @staticmethod
    def _lives_now(held: Held, node: Node, way: int, time: int) -> bool:
        item = held.copies.get(node) if way == NARROW or node in held.copies else held.at[node]
        if way in (AGAIN, ROUNDED):
            item = held.again.get(node)
        born = held.timeline.born.get(item) if item is not None else None
        return item is not None and born is not None and born <= time <= held.timeline.dies[item]

    @property
    def _order(self) -> Mapping[Node, int]:
        if not hasattr(self, "_positions"):
            step = self.needs.step
            self._positions = {n: i for half in (step.forward, step.backward) for i, n in enumerate(half)}
        return self._positions

    def _lies(self, node: Node) -> bool:
        kind = kind_of(node)
        if kind is not Kind.FUSED:
            return kind not in (Kind.FREE, Kind.VIEW)
        return any(kind_of(user) is Kind.EXTERN for user in node.users)

    def _solve(self, moments: Sequence[Moment], budget: float) -> Fit | None:
        """Return the choice of least cost within bounds, or None: the relaxed problem's, its fractions made whole."""
        rows = [*self._rows, *((moment.bytes, -np.inf, budget - moment.base) for moment in moments)]
        constraints = _constraints(rows, len(self.columns))
        relaxed = self._milp(constraints, np.zeros(len(self.cost)), np.ones(len(self.cost)), whole=False)
        if relaxed is None:
            return None
        # What the relaxed problem leaves whole stays: a handful of fractions is left to search.
        found = self._milp(constraints, np.floor(relaxed + _WHOLE), np.ceil(relaxed - _WHOLE), whole=True)
        if found is None:
            found = self._milp(constraints, np.zeros(len(self.cost)), np.ones(len(self.cost)), whole=True)
        if found is None:
            return None
        return self._replayed({node: way for (node, way), column in self.columns.items() if found[column] > 0.5})

    def _milp(self, constraints: LinearConstraint, least: Vector, most: Vector, *, whole: bool) -> Vector | None:
        scale = 1e3 / max(float(self.cost.sum()), 1e-30)  # to a size that HiGHS's tolerances are made for
        answer = milp(
            self.cost * scale,
            constraints=constraints,
            integrality=np.full(len(self.cost), int(whole)),
            bounds=Bounds(least, most),
            options={"time_limit": _SECONDS, "mip_rel_gap": 1e-3},
        )
        found: Vector | None = answer.x
        return found

    def _replayed(self, ways: Mapping[Node, int]) -> Fit:
        saved: Saved = {
            node: self.needs.low[node] if way == NARROW else self.needs.high[node]
            for node, way in ways.items()
            if way in (KEEP, NARROW)
        }
        seconds = sum(self._cost(node, way) for node, way in ways.items())
        return Fit(Held(self.needs.step, saved), ways, seconds)


_CHEAP = (Kind.FUSED, Kind.VIEW, Kind.FREE, Kind.PIECE)
_ROUNDS = 12
_MOMENTS = 12
_TRIALS = 5
_SECONDS = 4.0
_WHOLE = 1e-6


def _constraints(rows: Sequence[Row], size: int) -> LinearConstraint:
    # In units in which the largest coefficient of a row is 1.
    units = [max(map(abs, entries.values()), default=1.0) for entries, _, _ in rows]
    where = [
        (row, column, weight / units[row])
        for row, (entries, _, _) in enumerate(rows)
        for column, weight in entries.items()
    ]
    row, column, weight = zip(*where, strict=True)
    matrix = coo_array((weight, (row, column)), shape=(len(rows), size)).tocsr()
    bounds = np.array([(least, most) for _, least, most in rows]) / np.array(units)[:, None]
    return LinearConstraint(matrix, bounds[:, 0], bounds[:, 1])
