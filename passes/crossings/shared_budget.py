"""Share one budget among all graphs of a step: choose a point for each graph, so that no moment exceeds the budget.

While one half runs, tensors that other forwards saved wait, and in backward the gradients of graphs whose backward has
run are live. One point is chosen for each graph, so that the total time is least. With so few columns HiGHS solves this
at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxprec.passes.budget_part import BudgetPart
from fxprec.plan.rows import PeakPoint


@dataclass(frozen=True)
class Order:
    """The order in which the halves of a step's graphs run."""

    calls: tuple[int, ...]
    """The graph of each forward call."""
    halves: tuple[tuple[int, bool], ...]
    """Which call each half belongs to, by position, and whether it is the backward half."""

    @classmethod
    def of(cls, calls: Sequence[int], backwards: Sequence[int]) -> Order:
        """Return the order of a step that runs all forwards before the first backward."""
        forwards = tuple((at, False) for at in range(len(calls)))
        return cls(tuple(calls), (*forwards, *((at, True) for at in backwards)))

    def moments(self) -> Iterator[tuple[int, Sequence[int], Collection[int]]]:
        """Yield for each half its graph, the graphs whose saved tensors wait, and those whose gradients are there."""
        waiting, there = dict[int, int](), set[int]()
        for call, is_backward in self.halves:
            graph = self.calls[call]
            waiting.pop(call, None)
            yield graph, tuple(waiting.values()), frozenset(there)
            if is_backward:
                there.add(graph)
            else:
                waiting[call] = graph


@dataclass(frozen=True)
class SharedBudget:
    """The graphs of a step by number; ``orders``: in which they ran; ``gradients``: their bytes of gradients."""

    points: Mapping[int, Sequence[PeakPoint]]
    orders: Sequence[Order]
    gradients: Mapping[int, int]

    def least(self) -> int:
        """Return the least peak of all graphs together."""
        found = self.within(None)
        assert found is not None, "every graph has a point"
        return self.peak(found)

    def peak(self, chosen: Mapping[int, PeakPoint]) -> int:
        """Return the most bytes that are live at once in all graphs together."""
        return max(beside + chosen[graph].peak for graph, beside in self._beside(chosen))

    def parts(self, chosen: Mapping[int, PeakPoint], budget: int) -> Mapping[int, BudgetPart]:
        """Return each graph's part. Bytes that are left of the budget raise what each graph may keep waiting."""
        left = budget - self.peak(chosen)
        spare = left // (2 * max(len(order.calls) for order in self.orders))
        looser = {g: replace(p, waiting=p.waiting + spare) for g, p in chosen.items()}
        found = [*self._beside(looser)]
        beside = {g: max(size for graph, size in found if graph == g) for g in chosen}
        return {g: BudgetPart(budget, beside[g], looser[g].waiting, len(chosen)) for g in chosen}

    def _moments(self) -> Iterator[tuple[int, Sequence[int], int]]:
        """Yield for each half its graph, the graphs whose saved tensors wait, and the bytes of others' gradients."""
        for order in self.orders:
            for graph, waiting, there in order.moments():
                yield graph, waiting, sum(self.gradients[g] for g in there)

    def _beside(self, chosen: Mapping[int, PeakPoint]) -> Iterator[tuple[int, int]]:
        """Yield for each half its graph, and the bytes of other halves that live while it runs."""
        for graph, waiting, gradients in self._moments():
            yield graph, sum(chosen[g].waiting for g in waiting) + gradients

    def within(self, budget: float | None) -> Mapping[int, PeakPoint] | None:
        """Return the points of least total time within a budget, or None; without a budget, those of the least peak."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        columns = [(g, point) for g, points in self.points.items() for point in points]
        at = {g: [i for i, (owner, _) in enumerate(columns) if owner == g] for g in self.points}
        scale = max(point.peak for _, point in columns)
        rows, most = [], []
        for graph, waiting, gradients in self._moments():
            row = np.zeros(len(columns) + 1)
            for g in waiting:
                row[at[g]] += [columns[i][1].waiting / scale for i in at[g]]
            row[at[graph]] += [columns[i][1].peak / scale for i in at[graph]]
            row[-1] = -1.0  # the peak
            rows.append(row)
            most.append(-gradients / scale)
        one = np.zeros((len(at), len(columns) + 1))
        for row, graph in zip(one, at, strict=True):
            row[at[graph]] = 1.0
        seconds = np.array([*(point.seconds for _, point in columns), 0.0])
        cost = np.eye(len(columns) + 1)[-1] if budget is None else seconds * (1e3 / max(seconds.sum(), 1e-30))
        most_of = np.array([*(1.0 for _ in columns), np.inf if budget is None else budget / scale])
        answer = milp(
            cost,
            constraints=[LinearConstraint(np.array(rows), -np.inf, np.array(most)), LinearConstraint(one, 1.0, 1.0)],
            integrality=np.array([*(1 for _ in columns), 0]),
            bounds=Bounds(np.zeros(len(most_of)), most_of),
        )
        if answer.x is None:
            return None
        chosen = {g: columns[i][1] for g in at for i in at[g] if answer.x[i] > 0.5}
        return chosen if budget is None or self.peak(chosen) <= budget else None
