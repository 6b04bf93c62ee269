"""Find float32 tensors that a kernel may round in place, so that fewer bytes are allocated and written."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxprec.ir.operators import Trait, having
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import made_by, value

aten = torch.ops.aten
_FORCE = torch.ops.prims.inductor_force_stride_order.default

# Operators that always write a new tensor: none is a view, and Inductor removes none as a copy of its input.
_MAKES_NEW = ops.GEMMS | ops.GEMMS_BACKWARD | having(Trait.WRITES_NEW)
_SUMS_AND_PRODUCTS = having(Trait.WRITES_NEW_OF_TWO)


def can_round_in_place(x: Node) -> bool:
    """Return whether ``x`` is a dense float32 tensor in its own memory that only one node reads."""
    if len(x.users) != 1 or not _is_dense_float(x):
        return False
    if x.target is _FORCE:  # returns its input if the strides are right already
        return can_round_in_place(x.all_input_nodes[0])
    source = made_by(x)
    return source.target in _MAKES_NEW or (source.target in _SUMS_AND_PRODUCTS and _is_real_work(source))


def _is_real_work(node: Node) -> bool:
    """Return whether both operands are computed: Inductor drops an addition of a constant 0, and returns a view."""
    return all(isinstance(a, Node) and a.op == "call_function" and a.target is not aten.full.default for a in node.args)


def _is_dense_float(node: Node) -> bool:
    val = value(node)
    return val is not None and val.dtype == torch.float32 and bool(aten.is_non_overlapping_and_dense(val))
