"""Save at most a share of the bytes that are saved without a bound: torch's ``activation_memory_budget``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from torch.fx import Node

from fxprec.passes.analysis.ways import Form, Way
from fxprec.passes.budget_part import Bound
from fxprec.passes.crossings.choice import Chooser
from fxprec.passes.crossings.moments import Fit
from fxprec.passes.crossings.problem import Problem, Row, Ways

_MISSED = 1.05  # peaks are predicted this well


def within_share(free: Problem, default: Fit, share: float) -> Fit:
    """Return the fastest choice within ``share`` of the bytes that ``default`` saves; else the choice of fewest bytes.

    ``default`` is the solution of ``free``. The fastest choice may recompute much at once, and have a higher peak than
    ``default``. Then a choice with a lower peak is searched that saves no more than the share.

    Repeated nodes may read any input of the graph: inputs do not count as saved, as in torch. Here a saved byte costs
    one pass over memory, and each operator as long as moving its result.
    """
    rates, ways = replace(free.rates, light=1.0), (*free.allowed, "recompute")
    problem = replace(free, rates=rates, allowed=ways, price=1 / rates.bytes_per_s, is_bounded=True, inputs=())
    most = share * _saved(free, default.ways)
    found = problem.solve([_row(problem, most)])
    if found is None:
        found = replace(problem, price=1.0).solve([])
    assert found is not None, "what backward needs can be kept"
    chooser = Chooser(problem)
    fit = chooser.replayed(found)
    if not is_above(fit, default):
        return fit
    return _lower(chooser, fit, default.peak, max(most, _saved(problem, found)))


def is_above(fit: Fit, default: Fit) -> bool:
    """Return whether a choice holds more at its peak than the choice without a bound; a prediction's error is not."""
    return fit.peak > _MISSED * default.peak


def _lower(chooser: Chooser, fit: Fit, peak: int, most: float) -> Fit:
    """Return the fastest choice found within ``peak`` that saves at most ``most``; else the one of least peak."""

    def saves_less(found: Fit) -> bool:
        return _saved(chooser.problem, found.ways) <= most

    bound = Bound(peak, fit.waiting + most - _saved(chooser.problem, fit.ways))
    found = chooser.within(bound)
    if found is not None and saves_less(found):
        return found
    chooser.problem.effort.renew()
    fits = [fit, *chooser.approach(bound)]
    fits.append(chooser.lowered(min(fits, key=lambda f: f.excess(bound)), peak))
    return min(filter(saves_less, fits), key=lambda f: (max(f.peak, peak), f.seconds))


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
