"""Insert casts for storage ``simulate``: every counted tensor is rounded, exactly as the paper defines it.

docs/algorithms.md, "Where rounding happens": a parameter once a step; an output after its operator; the gradient of a
value once per consumer, in the format of that value's gradient, and not again after the consumers are summed; a
parameter's gradient once before it leaves the graph.
"""

from __future__ import annotations

from torch.fx import Node

from fxprec.passes.analysis.gradients import GradientWalk
from fxprec.passes.analysis.groups import Grouped
from fxprec.passes.analysis.joint import set_results
from fxprec.passes.sites import SiteBook, insertion_point_after, replace_uses


def insert_simulated_casts(grouped: Grouped, book: SiteBook) -> None:
    """Round every counted tensor of the joint graph in place."""

    def round_contribution(node: Node, target: Node, users: list[Node]) -> Node:
        with book.graph.inserting_before(insertion_point_after(node).next):
            q, rounded = book.store(node, grouped.grads[target], backward=True)
        replace_uses(node, rounded, [u for u in users if u is not q])
        return rounded

    GradientWalk(grouped, round_contribution).run()  # first: it reads the graph as autograd left it
    _round_values(grouped, book)
    _round_parameter_gradients(grouped, book)


def _round_values(grouped: Grouped, book: SiteBook) -> None:
    made_by = grouped.operators.of_node
    for node, tensor in grouped.values.items():
        book.store_result(node, tensor, inside=made_by[node].nodes if node in made_by else ())


def _round_parameter_gradients(grouped: Grouped, book: SiteBook) -> None:
    joint = grouped.operators.joint
    results = list(joint.results)
    for node, (position, _) in joint.gradients.items():
        tensor = grouped.grads.get(node)
        gradient = results[position]
        if tensor is not None and tensor.kind == "grad_param" and isinstance(gradient, Node):
            with book.graph.inserting_before(joint.output):
                _, results[position] = book.store(gradient, tensor, backward=True)
    set_results(joint.graph, results)
