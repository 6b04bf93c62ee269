"""Move comparisons of two forward tensors from backward to forward, where backward would compare their stored copies.

The gradient of a maximum goes to the larger operand, and half of it to each operand where they are equal. Numbers less
than 6 % apart often have equal copies in e4m3fn. The gradient of an intersection over union, a product of differences
of maxima, was off by 100 %. Backward now reads the comparison's result: one byte an element, as much as the copy, and
exact.

Comparisons with a number stay in backward: keep-signs keeps copies on their side of that number.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from fxprec.ir.operators import Trait, having
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import JointGraph, operator_of
from fxprec.passes.base import Pass, Work
from fxprec.passes.sites import emit, replace_node

_ORDERS = having(Trait.ORDERS)
_EQUALITIES = frozenset({ops.aten.eq.Tensor, ops.aten.ne.Tensor})


@dataclass(frozen=True)
class CompareInForward(Pass):
    """Move order comparisons of two forward values to forward, and equality comparisons of the same pairs."""

    name: str = "compare-in-forward"

    def apply(self, work: Work) -> None:
        joint = work.joint
        found = {node: pair for node in joint.backward_nodes() if (pair := _compared(joint, node)) is not None}
        ordered = {frozenset(pair) for node, pair in found.items() if node.target in _ORDERS}
        last = {node.meta["seq_nr"]: node for node in joint.forward_nodes() if "seq_nr" in node.meta}
        made: dict[tuple[object, Node, Node], Node] = {}
        for node, pair in found.items():
            if frozenset(pair) in ordered:
                key = (node.target, *pair)
                if key not in made:
                    like = last.get(node.meta.get("seq_nr"), max(pair))
                    moved = made[key] = _moved(node, pair, like)
                    if "seq_nr" in moved.meta:
                        last[moved.meta["seq_nr"]] = max(moved, last.get(moved.meta["seq_nr"], moved))
                replace_node(node, made[key])


def _compared(joint: JointGraph, node: Node) -> tuple[Node, Node] | None:
    """Return the two forward values that a backward node compares; None for any other node."""
    if node.target not in _ORDERS | _EQUALITIES:
        return None
    one, other = node.args
    both_forward = all(isinstance(x, Node) and not joint.in_backward(x) for x in (one, other))
    return (one, other) if both_forward else None  # type: ignore[return-value]


def _moved(node: Node, pair: tuple[Node, Node], like: Node) -> Node:
    """Insert a comparison into forward, behind its operands, as part of the operator that ``like`` is part of."""
    graph = node.graph
    with graph.inserting_after(max(*pair, like)):
        moved = emit(graph, operator_of(node), pair, like, backward=False, val=node.meta["val"])
    if "original_aten" in like.meta:
        moved.meta["original_aten"] = like.meta["original_aten"]
    return moved
