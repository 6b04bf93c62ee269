"""Where backward is linear in what it reads: there a stored copy may have any error whose mean is 0.

The gradient of a weight is a sum of products of what came into the operator and what comes back. If the first is
stored with errors of mean 0, the sum has the right mean, and what follows, the optimizer's step, sees noise, no bias.
Of any other reader backward goes on from: its errors meet others and themselves.
"""

from __future__ import annotations

from torch.fx import Node

from fxprec.passes.analysis import linear, ops
from fxprec.passes.analysis.joint import factors_of, is_backward, item_of, readers

_CONVOLUTION_BACKWARD = ops.existing(ops.aten, "convolution_backward convolution_overrideable_backward")
_MATMULS = ops.existing(ops.aten, "mm bmm addmm baddbmm mv addmv dot")
_INPUT, _WEIGHT_GRADIENT = 1, 1  # what convolution_backward reads, and what it makes of it
_LINEAR = linear.PASSING | ops.existing(ops.aten, "sum sum.dim_IntList") | ops.existing(ops.prims, "sum")


def linear_readers(copy: Node) -> tuple[list[Node], list[Node]]:
    """Return what reads a stored copy: products that make weight gradients and nothing else, and all the rest."""
    found: tuple[list[Node], list[Node]] = ([], [])
    for shown, reader in readers(copy, through=ops.VIEWS | ops.CASTS):
        found[not _makes_weight_gradient(shown, reader)].append(reader)
    return found


def _makes_weight_gradient(shown: Node, reader: Node) -> bool:
    if not is_backward(reader):
        return False
    if reader.target in _CONVOLUTION_BACKWARD:
        weights = [user for user in reader.users if (item := item_of(user)) is not None and item[1] == _WEIGHT_GRADIENT]
        others = [arg for i, arg in enumerate(reader.args) if i != _INPUT and arg is shown]
        return not others and all(_leaves(user) for user in weights)
    factors = factors_of(reader)
    return reader.target in _MATMULS and factors.count(shown) == 1 and _leaves(reader)


def _leaves(node: Node) -> bool:
    """Say whether a product is only moved, converted and added up on its way out of the graph."""
    return all(user.op == "output" or (user.target in _LINEAR and _leaves(user)) for user in node.users)
