"""Let backward read a difference of two values that forward computes, and not compute it from stored copies.

The gradient of a squared error is the difference between prediction and target, and torch's backward of ``mse_loss``
subtracts the two again. Computed from stored copies, the difference has an error of the operands' size. In e4m3fn the
gradient is 70 % off where predictions are within 0.05 of targets from 0 to 1, and 340 % within 0.005. Forward's
difference is one tensor instead of two, and stored it has an error of its own size.

Differences from a smaller tensor, such as a mean, stay: store-centred looks at the readers of the stored copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec.ir.operators import Trait, having
from fxprec.passes.analysis.joint import JointGraph, numel_hint, same_shape, value
from fxprec.passes.base import Pass, Work
from fxprec.passes.sites import emit, replace_node

_SUB = torch.ops.aten.sub.Tensor
_HARMLESS = frozenset(map(str, having(Trait.BEARS_ROUNDING)))
_Difference = tuple[Node, Node, object]


@dataclass(frozen=True)
class SubtractInForward(Pass):
    """Replace backward differences of two forward values by forward's results, where forward has them."""

    name: str = "subtract-in-forward"

    def apply(self, work: Work) -> None:
        joint = work.joint
        own = {pair: node for node in joint.forward_nodes() if (pair := _difference(joint, node)) is not None}
        for node in list(joint.backward_nodes()):
            if (pair := _difference(joint, node)) is None:
                continue
            one, other, alpha = pair
            if pair in own and _is_like(node, own[pair]):
                _part(own[pair])
                replace_node(node, own[pair])
            elif alpha == 1 and (turned := own.get((other, one, alpha))) is not None and _is_like(node, turned):
                _part(turned)
                replace_node(node, _negated(node, turned))


def _difference(joint: JointGraph, node: Node) -> _Difference | None:
    """Return the two forward values of equal size that a node subtracts, and the factor; None for any other node."""
    if node.target is not _SUB or len(node.args) != 2:
        return None
    one, other = node.args
    if not (isinstance(one, Node) and isinstance(other, Node)) or joint.in_backward(one) or joint.in_backward(other):
        return None
    sizes = {None if (val := value(n)) is None else numel_hint(val) for n in (one, other)}
    return (one, other, node.kwargs.get("alpha", 1)) if len(sizes) == 1 and None not in sizes else None


def _negated(node: Node, turned: Node) -> Node:
    """Insert the negative of a forward difference before ``node``, as a target's gradient reads it."""
    with node.graph.inserting_before(node):
        return emit(node.graph, torch.ops.aten.neg.default, (turned,), node, backward=True, val=node.meta["val"])


def _is_like(one: Node, other: Node) -> bool:
    a, b = value(one), value(other)
    return a is not None and b is not None and same_shape(a, b) and a.dtype == b.dtype


def _part(difference: Node) -> None:
    """Make the difference an operator of its own, whose result is counted, where its operator tolerates 8 bits."""
    whole = str(difference.meta.get("original_aten", _SUB))
    if not _HARMLESS.isdisjoint((whole, whole.rpartition(".")[0])):
        difference.meta["original_aten"] = _SUB
