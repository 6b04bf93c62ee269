"""Find the values from which only the loss is computed: those behind the last layer's matrix product.

A loss compares predictions with targets, or two views of the same data. Near convergence its gradient is a small
difference of such values, and the error of a stored copy is as large as the values. The gradient of a cosine similarity
of 0.995 is 33 % off in e4m3fn, that of a structural similarity 90 %. Autocast computes losses in float32 and saves what
they read in float32; these values keep their own dtype likewise. They are few.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch.fx import Node

from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import JointGraph, factors_of, tensor_of
from fxprec.passes.analysis.operators import Operators

_LAYER, _LOSS = "layer", "loss"


def leading_to_loss(joint: JointGraph) -> frozenset[Node]:
    """Return the inputs and results that lead to an output of at most one dimension with a gradient, and to no layer.

    A layer multiplies by a parameter, or by another input with a gradient. A matrix of similarities of two results
    belongs to the loss. A larger output is no end: it is returned, or goes on in the graph behind a graph break.
    """
    weights = _weights(joint)
    losses = {out for out in joint.differentiated if tensor_of(out).ndim <= 1}
    ends: dict[Node, str] = {}
    for node in reversed([*joint.placeholders, *joint.forward_nodes()]):
        users = [user for user in node.users if user.op != "output" and not joint.in_backward(user)]
        found = {_LAYER if _is_layer(user, weights) else ends.get(user) for user in users}
        if _LAYER in found:
            ends[node] = _LAYER
        elif _LOSS in found or node in losses:
            ends[node] = _LOSS
    return frozenset(node for node, end in ends.items() if end == _LOSS)


def shared_with_loss(operators: Operators, in_loss: Collection[Node]) -> frozenset[Node]:
    """Return the values that a layer reads and that a loss's own backward reads too.

    ``in_loss`` are the values that lead to a loss alone. An operator whose results are all of these is part of a loss,
    unless it is a layer.
    """
    weights = _weights(operators.joint)
    found: set[Node] = set()
    for op in operators.all:
        is_in_loss = bool(op.outputs) and all(out in in_loss for out in op.outputs)
        if is_in_loss and not any(_is_layer(node, weights) for node in op.nodes):
            read = {n for node in op.backward for n in node.all_input_nodes if not operators.joint.in_backward(n)}
            found |= {operators.base(n) for n in read}
    return frozenset(found.difference(in_loss))


def _is_layer(node: Node, weights: frozenset[Node]) -> bool:
    return node.target in ops.GEMMS and not weights.isdisjoint(factors_of(node))


def _weights(joint: JointGraph) -> frozenset[Node]:
    """Return what is computed from parameters, and not from data by matrix products.

    A weight that the caller gives as an input (``torch.func.functional_call``) has a gradient.
    """
    inputs = joint.placeholders
    learned = joint.gradients.keys() | {n for n in inputs if joint.describe(n).kind == "param"}
    nodes = list(joint.forward_nodes())
    of_learned = _computed_from(learned, nodes)
    of_data = _computed_from((n for n in inputs if joint.describe(n).kind == "input"), nodes)
    of_products = _computed_from((n for n in nodes if n.target in ops.GEMMS), nodes)
    return frozenset(of_learned - (of_data & of_products))


def _computed_from(sources: Iterable[Node], nodes: Iterable[Node]) -> set[Node]:
    """Return the sources and the nodes computed from them; ``nodes`` are in execution order."""
    found = set(sources)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
