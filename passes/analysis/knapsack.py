"""Solve the exact policy's problem: a 0/1 covering knapsack, by HiGHS (Lee et al. 2023, Theorem 3.2).

    minimise  sum of damage over the chosen   subject to   sum of weight over the chosen >= need

HiGHS works in floating point with absolute tolerances. Element counts up to 1e10 and damages from 1e-12 to 1e6 do not
fit into these. So the problem is scaled to the range of an optimal solution, and every answer is checked in exact
integers. An answer that falls short comes back as a cover cut: "something outside this set must be chosen".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

MAX_CUTS = 200
# HiGHS stops at an absolute objective gap of 1e-6, which scipy does not expose. At this scale of the objective the gap
# is a relative 1e-10.
_OBJECTIVE_SCALE = 1e4
# The heaviest coefficient. If weights agree to 1e-9, HiGHS 1.12 called 9 of 1500 feasible problems infeasible at 1e10,
# 7 at 1e6, none at 1e3. The slack keeps every exact cover clear of HiGHS's tolerances.
_WEIGHT_SCALE = 1e3
_SLACK = 1e-3
_UNBOUNDED = 1e200  # sums of smaller damages stay finite
_PROVED = 1e-8  # a gap below HiGHS's own accuracy counts as closed

_Order = Callable[[int], tuple[float, int]]
_Cut = tuple[frozenset[int], int]  # (items, how many of them must be chosen at least)


@dataclass(frozen=True, slots=True)
class Cover:
    """Chosen items, their summed damage, and the proved relative distance of that from the optimum (0: optimal)."""

    chosen: frozenset[int]
    damage: float
    gap: float


def min_damage_cover(
    weights: Sequence[int], damages: Sequence[float], need: int, *, time_limit: float = 10.0
) -> Cover | None:
    """Return the items of least damage whose weights reach ``need``, or None if all together do not.

    ``weights`` are integers (items of zero or negative weight are never chosen), ``damages`` are non-negative. An item
    of infinite or NaN damage is chosen only if the others cannot reach ``need``. ``time_limit`` is in seconds. After
    it, the best cover found is returned with the gap proved so far.
    """
    useful = [i for i, weight in enumerate(weights) if weight > 0]
    if sum(weights[i] for i in useful) < need:
        return None
    forced = _forced(useful, weights, damages, need)
    free = [i for i in useful if damages[i] < _UNBOUNDED]
    assert all(damages[i] >= 0 for i in free), "damage is an absolute value"
    search = _Search(weights, damages, need - sum(weights[i] for i in forced), free, time_limit)
    chosen = search.run()
    damage = math.fsum(damages[i] for i in chosen)
    gap = 0.0 if damage <= search.bound else (damage - search.bound) / damage
    return Cover(chosen | forced, damage if not forced else math.inf, gap if gap > _PROVED else 0.0)


def _forced(useful: Iterable[int], weights: Sequence[int], damages: Sequence[float], need: int) -> frozenset[int]:
    """Return the items of unbounded damage that are needed anyway: the heaviest, as few as possible."""
    unbounded = [i for i in useful if not damages[i] < _UNBOUNDED]
    missing = need - sum(weights[i] for i in useful if damages[i] < _UNBOUNDED)
    taken: list[int] = []
    for i in sorted(unbounded, key=lambda i: (-weights[i], i)):
        if missing <= 0:
            break
        taken.append(i)
        missing -= weights[i]
    return frozenset(taken)


class _Search:
    """One solve: a feasible start, then HiGHS with cover cuts; the better result wins."""

    def __init__(
        self, weights: Sequence[int], damages: Sequence[float], need: int, items: Sequence[int], time_limit: float
    ) -> None:
        self.weights, self.damages, self.need = weights, damages, need
        self.deadline = time.monotonic() + time_limit
        self.best = self._start(items)
        self.bound = 0.0  # proved lower bound on the damage
        ceiling = self.cost(self.best)
        self.items = [i for i in items if damages[i] <= ceiling]  # a dearer item is in no optimal cover
        self.ceiling = ceiling
        # Whole coefficients where they fit: HiGHS handles those exactly.
        divisor = math.gcd(*(weights[i] for i in self.items)) or 1
        self.weight_unit = max(divisor, max((weights[i] for i in self.items), default=1) / _WEIGHT_SCALE)

    def cost(self, chosen: Iterable[int]) -> float:
        return math.fsum(self.damages[i] for i in chosen)

    def weight(self, chosen: Iterable[int]) -> int:
        return sum(self.weights[i] for i in chosen)

    def run(self) -> frozenset[int]:
        """Return the best cover found, and set ``bound`` to the proved lower bound."""
        if self.need <= 0 or self.cost(self.best) == 0:
            return self.best
        cuts: list[_Cut] = []
        while len(cuts) <= MAX_CUTS and time.monotonic() < self.deadline:
            answer = self._solve(cuts)
            if answer is None:
                break
            if self.weight(answer) >= self.need:
                self._offer(answer)
                break
            cuts.append(self._cut_off(answer))
            self._offer(self._repaired(answer))
        return self.best

    def _solve(self, cuts: Sequence[_Cut]) -> frozenset[int] | None:
        """Return HiGHS's choice, and raise ``bound`` to the bound that HiGHS proves."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # takes 0.5 s, which a start from the cache saves

        rows = [[self.weights[i] / self.weight_unit for i in self.items]]
        rows += [[float(i in members) for i in self.items] for members, _ in cuts]
        least = [self.need / self.weight_unit - _SLACK, *(float(count) for _, count in cuts)]
        result = milp(
            c=np.array([self.damages[i] / self.ceiling * _OBJECTIVE_SCALE for i in self.items]),
            integrality=np.ones(len(self.items), dtype=np.int64),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(np.array(rows), lb=np.array(least)),
            options={"mip_rel_gap": 0.0, "time_limit": max(0.01, self.deadline - time.monotonic())},
        )
        if result.mip_dual_bound is not None and math.isfinite(result.mip_dual_bound):
            self.bound = max(self.bound, result.mip_dual_bound / _OBJECTIVE_SCALE * self.ceiling)
        if result.x is None:
            return None
        return frozenset(i for i, x in zip(self.items, result.x, strict=True) if x > 0.5)

    def _cut_off(self, short: frozenset[int]) -> _Cut:
        """Return an inequality that every cover meets and ``short`` does not: an extended cover inequality.

        Grow ``short`` as far as it still falls short, and call the rest C. No cover leaves out all of C. Nor does a
        cover leave out any |C| of the items that are in C or at least as heavy as all of C. So all but |C| - 1 of these
        must be chosen.
        """
        grown = set(short)
        room = self.need - 1 - self.weight(short)
        for i in sorted(self.items, key=lambda i: (-self.weights[i], i)):
            if i not in grown and self.weights[i] <= room:
                grown.add(i)
                room -= self.weights[i]
        rest = frozenset(self.items) - grown
        heaviest = max(self.weights[i] for i in rest)
        members = rest | {i for i in self.items if self.weights[i] >= heaviest}
        return members, len(members) - len(rest) + 1

    def _repaired(self, short: frozenset[int]) -> frozenset[int]:
        """Complete a set that falls short with the items of least damage per weight."""
        rest = [i for i in self.items if i not in short]
        return short | self._greedy(rest, self.need - self.weight(short), self._by_efficiency)

    def _start(self, items: Sequence[int]) -> frozenset[int]:
        """Return the best of three greedy covers: by weight (the paper's order), by damage, by damage per weight."""
        orders: tuple[_Order, ...] = (
            lambda i: (-self.weights[i], i),
            lambda i: (self.damages[i], i),
            self._by_efficiency,
        )
        covers = [self._pruned(self._greedy(items, self.need, order)) for order in orders]
        return min(covers, key=lambda chosen: (self.cost(chosen), len(chosen)))

    def _by_efficiency(self, i: int) -> tuple[float, int]:
        return self.damages[i] / self.weights[i], i

    def _greedy(self, items: Iterable[int], need: int, order: _Order) -> frozenset[int]:
        chosen: list[int] = []
        for i in sorted(items, key=order):
            if need <= 0:
                break
            chosen.append(i)
            need -= self.weights[i]
        return frozenset(chosen)

    def _offer(self, chosen: frozenset[int]) -> None:
        chosen = self._pruned(chosen)
        if (self.cost(chosen), len(chosen)) < (self.cost(self.best), len(self.best)):
            self.best = chosen

    def _pruned(self, chosen: frozenset[int]) -> frozenset[int]:
        """Drop items that are not needed, the most harmful first: HiGHS ignores damages far below the largest."""
        kept = set(chosen)
        spare = self.weight(chosen) - self.need
        for i in sorted(chosen, key=lambda i: (-self.damages[i], self.weights[i], i)):
            if self.weights[i] <= spare:
                kept.remove(i)
                spare -= self.weights[i]
        return frozenset(kept)
