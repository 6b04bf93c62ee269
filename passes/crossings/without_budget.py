"""Choose without a budget: few bytes come first, and backward recomputes what loops compute from what is saved."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from fxprec.passes.analysis.joint import value
from fxprec.passes.base import Work
from fxprec.passes.crossings.choice import Chooser
from fxprec.passes.crossings.costs import Rates
from fxprec.passes.crossings.needs import Needs
from fxprec.passes.crossings.problem import Problem, Ways
from fxprec.passes.forms.low import Low

_LIGHT = 1 / 16
"""Time of a light operator in a loop, over that of moving its result. Plans under a peak budget take 1."""
_PASSES = 32
"""What a saved byte costs, in passes over memory: few bytes come first. Of two choices with as many the faster one is
taken."""


def without_budget(work: Work, needs: Needs) -> Problem:
    """Return the problem whose solution is the choice where no budget bounds what is saved."""
    high, forms = _read_high(needs), dict(needs.forms)
    for node, offered in needs.forms.items():
        low = tuple(form for form in offered if isinstance(form, Low))
        if low and node not in high:  # backward reads nothing but the low copy
            forms[node] = low
    rates = replace(Rates.of(work.joint.device), light=_LIGHT)
    price, inputs = _PASSES / rates.bytes_per_s, _inputs(work, needs)
    return Problem(replace(needs, forms=forms), rates, ("narrow",), price=price, is_bounded=False, inputs=inputs)


def ways_without_budget(work: Work, needs: Needs) -> Ways:
    """Return the choice without a budget, for a budget to begin from; empty where the options forbid a way of it."""
    if not {"narrow", "recompute"} <= set(work.settings.ways) or work.settings.recipe.saved is not None:
        return {}
    problem = without_budget(work, needs)
    ways = Chooser(problem).unlimited.ways
    return {node: way for node, way in ways.items() if node not in problem.inputs}


def _read_high(needs: Needs) -> set[Node]:
    """Return the values that backward reads above 8 bits, and what views among them show: views are not saved."""
    found, stack = set[Node](), [*needs.read_high]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += () if node in needs.forms else map(needs.step.undecoded, node.all_input_nodes)
    return found


def _inputs(work: Work, needs: Needs) -> set[Node]:
    """Return the model's inputs that backward does not read above 8 bits; parameters and buffers are left out."""
    inputs = (node for node in work.joint.graph.find_nodes(op="placeholder") if value(node) is not None)
    return {node for node in inputs if work.joint.describe(node).kind == "input"} - needs.read_high
