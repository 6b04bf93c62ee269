"""What made a gradient before it is cast, and so its distribution (Zhao et al. 2020, section 3)."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Node

from fxprec.ir import symbolic
from fxprec.passes.analysis import linear, ops
from fxprec.passes.analysis.joint import is_backward, value
from fxprec.passes.analysis.operators import Operators
from fxprec.plan.scales import Gemm, Producer

_SOFTMAX = frozenset({"aten._softmax", "aten._log_softmax", "aten._safe_softmax"})
_MASK = ops.existing(torch.ops.aten, "where.self where.ScalarOther where.ScalarSelf")
# Layout between a GEMM and its cast, or between a stored operand and its GEMM.
_LAYOUT = ops.VIEWS | ops.CASTS


def producer_of(x: Node, operators: Operators, casts: Mapping[Node, int]) -> tuple[Producer, Gemm | None]:
    """Say what made gradient ``x``: a GEMM on stored operands, a softmax's backward, or something else.

    ``casts`` gives the table's row of each gradient stored so far, by its quantize node.
    """
    source = _through(x, masks=True)
    owner = operators.of_backward_node.get(source) or operators.of_backward_node.get(x)
    if owner is not None and owner.aten in _SOFTMAX:
        return "softmax", None
    gemm = _gemm(source, casts)
    return ("other", None) if gemm is None else ("gemm", gemm)


def _through(node: Node, *, masks: bool = False) -> Node:
    """Follow layout copies, and a ReLU's mask, back to what computed the values."""
    while True:
        if node.target in _LAYOUT or node.target is symbolic.KEEP_NONFINITE:
            following = node.args[0]
        elif masks and node.target in _MASK and is_zero(node.args[1]):
            following = node.args[2]
        elif masks and node.target in _MASK and is_zero(node.args[2]):
            following = node.args[1]
        else:
            return node
        assert isinstance(following, Node)
        node = following


def is_zero(arg: object) -> bool:
    """Say whether an argument is 0 everywhere, so that every scale fits it."""
    if not isinstance(arg, Node):
        return isinstance(arg, int | float) and arg == 0
    while arg.target in ops.VIEWS:
        source = arg.args[0]
        assert isinstance(source, Node)
        arg = source
    if arg.target in linear.ZEROS:
        return True
    position = linear.FILLS.get(arg.target)
    return position is not None and bool(arg.args[position] == 0)


def _gemm(node: Node, casts: Mapping[Node, int]) -> Gemm | None:
    if node.target is operator.getitem and node.args[1] == 0:
        source = node.args[0]
        assert isinstance(source, Node)
        if source.target is not torch.ops.aten.convolution_backward.default:
            return None
        node, positions = source, (0, 2)
    elif node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        positions = (0, 1)
    else:
        return None
    rows = [_row(node.args[p], casts) for p in positions]
    gradients = [p for p, (_, is_gradient) in zip(positions, rows, strict=True) if is_gradient]
    if len(gradients) != 1 or any(row is None for row, _ in rows):
        return None
    by_kind = {is_gradient: row for row, is_gradient in rows}
    gradient, operand = by_kind[True], by_kind[False]
    assert gradient is not None
    assert operand is not None
    return Gemm(length=_length(node), gradient=gradient, operand=operand)


def _row(arg: object, casts: Mapping[Node, int]) -> tuple[int | None, bool]:
    """Return (row of the table where ``arg`` is stored, whether it is a gradient)."""
    if not isinstance(arg, Node):
        return None, False
    node = _through(arg)
    if node.target is not symbolic.DEQUANTIZE:
        return None, is_backward(node)
    q = node.args[0]
    assert isinstance(q, Node)
    if q in casts:
        return casts[q], True
    row = q.args[2]
    assert isinstance(row, int)
    return (None, True) if is_backward(q) else (row, False)


def _length(node: Node) -> int:
    """Accumulation length of a GEMM whose result is an input's gradient, at the traced sizes."""
    if node.target is torch.ops.aten.convolution_backward.default:
        weight, transposed, groups = node.args[2], node.args[7], node.args[9]
        assert isinstance(weight, Node)
        assert isinstance(groups, int)
        shape = _shape(weight)  # (out, in / groups, *kernel); transposed: (in, out / groups, *kernel)
        channels = shape[1] if transposed else shape[0] // groups
        return channels * torch.Size(shape[2:]).numel()
    first = node.args[0]
    assert isinstance(first, Node)
    return _shape(first)[-1]


def _shape(node: Node) -> list[int]:
    val = value(node)
    assert val is not None
    return [int(s.node.hint) if isinstance(s, torch.SymInt) and s.node.hint is not None else int(s) for s in val.shape]
