"""Estimate the power of two by which constants change gradients on their way from the tangents.

A mean over N elements divides by N. So if the loss is part of the graph, the tangent is 1, and all later gradients are
N times smaller. The first scales of gradients, before anything is measured, are chosen by this factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch.fx import Graph, Node

from fxprec.ir.operators import Trait, having, those
from fxprec.passes.analysis.joint import (
    JointGraph,
    factors_of,
    is_backward,
    made_by,
    numel_hint,
    shown,
    unconverted,
    value,
)

_PRODUCTS = having(Trait.SCALES)
_QUOTIENTS = those(lambda spec: Trait.SCALES in spec.traits and spec.divisor_at == 1)
_SUMS = having(Trait.SUMS)


def constant_factors(graph: Graph) -> Mapping[Node, float]:
    """Return log2 of the constant factor of each backward node; forward nodes and tangents have 0.

    An operator other than a product takes the largest factor among the gradients it reads, or among all operands if it
    reads no gradient.
    """
    found: dict[Node, float] = {}
    gradients = set[Node]()
    for node in graph.nodes:
        if JointGraph.is_tangent(node):
            gradients.add(node)
        elif node.op == "call_function" and is_backward(node):
            read = [n for n in node.all_input_nodes if n in gradients]
            found[node] = _factor(node, read or node.all_input_nodes, found)
            if read:
                gradients.add(node)
    return found


def growth_of(x: Node, *, is_param: bool) -> float:
    """Return log2 of how much larger a gradient may be than the values that a sum or a GEMM adds up to it.

    The products of a GEMM have either sign, and so do the elements of a weight. A parameter's gradient adds the
    contributions of a whole batch, which may have one sign.
    """
    source = made_by(shown(x)[0])
    added = [source.all_input_nodes[0]] if source.target in _SUMS else factors_of(source)[:2]
    counts = [numel_hint(val) for n in added if (val := value(n)) is not None]
    total = value(x)
    if total is None or not counts or not all(counts):
        return 0.0
    length = math.prod(counts) / numel_hint(total)  # the length of a sum; for a GEMM the square of its length
    return math.log2(length) / (len(counts) if is_param or len(counts) == 1 else 2 * len(counts))


def _factor(node: Node, read: list[Node], found: Mapping[Node, float]) -> float:
    if node.target not in _PRODUCTS or len(node.args) < 2:
        return max((found.get(n, 0.0) for n in read), default=0.0)
    a, b = node.args[:2]
    if node.target in _QUOTIENTS:
        return _of(a, found) - (_of_count(b, node) if isinstance(b, Node) and b not in found else _of(b, found))
    return _of(a, found) + _of(b, found)


def _of(arg: object, found: Mapping[Node, float]) -> float:
    if isinstance(arg, Node):
        return found.get(arg, 0.0)
    return math.log2(abs(arg)) if isinstance(arg, int | float) and 0 < abs(arg) < math.inf else 0.0


def _of_count(divisor: Node, quotient: Node) -> float:
    """Return log2 of the count that a 0-dim forward divisor is taken for; 0 for other divisors.

    Cross entropy divides by the number of targets that are not ignored, a sum over bools. Other counts are inputs, such
    as the number of tokens. They are taken for the number of elements that the quotient is broadcast to.
    """
    val, counted = value(divisor), unconverted(divisor)
    if val is None or val.dim():
        return 0.0
    summed = value(counted.all_input_nodes[0]) if counted.target in _SUMS else None
    count = _broadcast_to(quotient) if summed is None else numel_hint(summed)
    return math.log2(max(1, count))


def _broadcast_to(node: Node) -> int:
    """Return the elements of the first tensor with dimensions that is computed from the 0-dim ``node``."""
    seen = [node]
    for reached in seen:
        val = value(reached)
        if val is not None and val.dim():
            return numel_hint(val)
        seen += [user for user in reached.users if user not in seen]
    return 1
