"""Calibrate policy ``exact``: insert nodes that measure every counted tensor and its gradient in one step.

For that step the pass replaces the passes that insert casts. The plan is then solved from the measured damage.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxprec.config.recipes import Recipe
from fxprec.ir.symbolic import Damage, Observe
from fxprec.passes.analysis.gradients import GradientWalk
from fxprec.passes.analysis.groups import Grouped
from fxprec.passes.analysis.joint import same_shape, tensor_of
from fxprec.passes.analysis.values import is_plain_float
from fxprec.passes.base import Pass, Work
from fxprec.passes.lowering.stats import append_gathered
from fxprec.passes.sites import emit_call, insertion_point_after, replace_node, replace_uses


@dataclass(frozen=True)
class InsertObservers(Pass):
    """Insert ``observe`` nodes in the backward half."""

    name: str = "insert-observers"

    def apply(self, work: Work) -> None:
        walk = GradientWalk(work.grouped, lambda node, target, users: node)
        walk.run()
        # gradient -> its last observe node: several values may share a gradient, as a sum and its addends
        latest: dict[Node, Node] = {}
        gradients = {value: walk.gradient_of(value) for value in work.grouped.values}
        for value, gradient in gradients.items():
            if gradient is None:
                continue
            found = latest.get(gradient, gradient)
            latest[gradient] = _observe(work.grouped, value, found, work.settings.recipe)


def _observe(grouped: Grouped, value: Node, gradient: Node, recipe: Recipe) -> Node:
    """Insert an ``observe`` node, and return the gradient that its users read from now on."""
    if not same_shape(tensor_of(gradient), tensor_of(value)):
        return gradient  # a view of the gradient: the walk found no sum in the value's own shape
    if not is_plain_float(gradient):
        return gradient
    graph = grouped.operators.joint.graph
    users = list(gradient.users)
    later = max(insertion_point_after(gradient), insertion_point_after(value))
    with graph.inserting_before(later.next):
        tensor = grouped.values[value].id
        observe = Observe(gradient, value, tensor, recipe.lo_forward.name, recipe.lo_backward.name)
        observed = emit_call(graph, observe, gradient, backward=True)
    replace_uses(gradient, observed, users)
    return observed


def measure(gm: GraphModule) -> tuple[int, ...]:
    """Append the damages of a partitioned graph's observed tensors to its outputs; return the tensors' ids in order.

    Each tensor has two numbers: its own damage and its gradient's.
    """
    damages: dict[int, Node] = {}
    for node, observe in Observe.among(Observe.nodes(gm.graph)):
        with gm.graph.inserting_before(node):
            damages[observe.tensor] = Damage.like(observe).insert(gm.graph)
        replace_node(node, observe.grad)
    if damages:
        append_gathered(gm.graph, list(damages.values()))
    gm.recompile()
    return tuple(damages)
