"""Improve a choice in small steps: in each, a problem whose solution may differ from the choice in a few values only.

A row of the solver has the live bytes of one replayed choice, and estimates of what other ways would hold. The
estimates are good for few changes, and wrong for many. So a step is limited, as in a trust-region method. Each row may
be exceeded at a price, since a bound that no single step reaches may be reached in several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fxprec.passes.crossings.problem import ROUGHLY, WHOLE, Problem, Row, Ways, constraints_of

_PRICE = 10.0  # of exceeding a row by its whole limit, in costs of all ways together
_BRANCHES = 30  # branch-and-bound nodes of one step


@dataclass(frozen=True)
class Nearby:
    """The choices that differ from ``ways`` in at most ``changes`` values."""

    problem: Problem
    ways: Ways
    changes: int

    def best(self, rows: Sequence[Row], limit: float) -> Ways | None:
        """Return the choice of least cost and excess; ``limit``: bytes by which a row is exceeded for `_PRICE`."""
        from scipy.optimize import Bounds, milp

        size, more = len(self.problem.columns), len(rows)
        if not size:
            return None
        elastic = [({**row, size + i: -limit}, least, most) for i, (row, least, most) in enumerate(rows)]
        constraints = constraints_of([*self.problem.rows, self._region(), *elastic], size + more)
        price = np.full(more, _PRICE * float(self.problem.cost.sum()))
        cost = np.append(self.problem.cost, price) * self.problem.scale
        free = np.zeros(more), np.full(more, np.inf)
        bounds = Bounds(np.append(np.zeros(size), free[0]), np.append(np.ones(size), free[1]))
        relaxed = milp(cost, constraints=constraints, bounds=bounds).x
        if relaxed is None:
            return None
        least, most = np.floor(relaxed[:size] + WHOLE), np.ceil(relaxed[:size] - WHOLE)
        found = milp(
            cost,
            constraints=constraints,
            integrality=np.append(np.ones(size), np.zeros(more)).astype(np.int64),
            bounds=Bounds(np.append(least, free[0]), np.append(most, free[1])),
            options={"node_limit": _BRANCHES, "mip_rel_gap": ROUGHLY},
        ).x
        if found is None:
            return None
        return {node: way for (node, way), column in self.problem.columns.items() if found[column] > 0.5}

    def _region(self) -> Row:
        """Return the row that limits the changes: a value that loses its way, or gets one that it did not have."""
        columns: Mapping[int, float] = {
            column: -1.0 if self.ways.get(node) == way else 1.0
            for (node, way), column in self.problem.columns.items()
            if node not in self.ways or self.ways[node] == way
        }
        return columns, -np.inf, self.changes - sum(weight < 0 for weight in columns.values())
