"""The choice that saves at most a share of what is saved without a bound: torch's ``activation_memory_budget``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fxprec.passes.analysis.peak.choice import Chooser, Fit
from fxprec.passes.analysis.peak.problem import Problem, Row, Ways, is_kept


def within_share(free: Problem, share: float) -> Fit:
    """Return the choice of least time within ``share`` of the bytes that ``free`` saves; of fewest, where none is.

    What is computed again may start from any input: those are not counted, as torch counts them not.
    """
    problem = replace(free, allowed=(*free.allowed, "recompute"), inputs=())
    most = share * _saved(free, Chooser(free).unlimited.ways)
    ways = problem.solve([_row(problem, most)])
    if ways is None:
        ways = replace(problem, price=1.0).solve([])
    assert ways is not None, "what backward needs can be kept"
    return Chooser(problem).replayed(ways)


def _saved(problem: Problem, ways: Ways) -> int:
    return sum(problem.size(node, way) for node, way in ways.items() if _counts(problem, node, way))


def _row(problem: Problem, most: float) -> Row:
    """Return the row of which choices save at most so many bytes."""
    columns = problem.columns.items()
    return {at: float(problem.size(*key)) for key, at in columns if _counts(problem, *key)}, -np.inf, most


def _counts(problem: Problem, node: object, way: int) -> bool:
    return is_kept(way) and node not in problem.inputs
