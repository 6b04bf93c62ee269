"""Save at most a share of the bytes that are saved without a bound: torch's ``activation_memory_budget``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from torch.fx import Node

from fxprec.passes.analysis.ways import Form, Way
from fxprec.passes.crossings.choice import Chooser, Fit
from fxprec.passes.crossings.problem import Problem, Row, Ways


def within_share(free: Problem, share: float) -> Fit:
    """Return the fastest choice within ``share`` of the bytes that ``free`` saves; else the choice of fewest bytes.

    Repeated nodes may read any input of the graph: inputs do not count as saved, as in torch. Here a saved byte costs
    one pass over memory, and each operator as long as moving its result.
    """
    rates, ways = replace(free.rates, light=1.0), (*free.allowed, "recompute")
    problem = replace(free, rates=rates, allowed=ways, price=1 / rates.bytes_per_s, is_bounded=True, inputs=())
    most = share * _saved(free, Chooser(free).unlimited.ways)
    found = problem.solve([_row(problem, most)])
    if found is None:
        found = replace(problem, price=1.0).solve([])
    assert found is not None, "what backward needs can be kept"
    return Chooser(problem).replayed(found)


def _saved(problem: Problem, ways: Ways) -> int:
    return sum(size for node, way in ways.items() for size in _size(problem, node, way))


def _row(problem: Problem, most: float) -> Row:
    """Return the row that limits a choice to ``most`` saved bytes."""
    columns = problem.columns.items()
    return {at: float(size) for (node, way), at in columns for size in _size(problem, node, way)}, -np.inf, most


def _size(problem: Problem, node: Node, way: Way) -> Iterator[int]:
    """Yield the bytes that a way saves, if it saves any."""
    if isinstance(way, Form) and node not in problem.inputs:
        yield problem.size(node, way)
