"""Find the operator that made a gradient: it decides the gradient's distribution (Zhao et al. 2020, section 3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from fxprec.ir.operators import Trait, having
from fxprec.ir.symbolic import KEEP_NONFINITE, Dequantize, Quantize, is_in_blocks
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import argument, dim_hint, input_at, is_backward, item_of, tensor_of
from fxprec.passes.analysis.operators import Operators
from fxprec.plan.scales import GradientGemm, Producer

_CONVOLUTION = torch.ops.aten.convolution_backward.default
_SOFTMAX = frozenset(map(str, having(Trait.SOFTMAX)))
_CHOICES = having(Trait.SELECTS)
# Layout between a GEMM and its cast, or between a stored operand and its GEMM.
_LAYOUT = ops.VIEWS | ops.CASTS


def producer_of(x: Node, operators: Operators, casts: Mapping[Node, int]) -> tuple[Producer, GradientGemm | None]:
    """Return the kind of operator that computed gradient ``x``; for a GEMM on stored operands also its table rows.

    ``casts`` has the table's row of each gradient stored so far, by its quantize node.
    """
    source = _through(x, masks=True)
    owner = operators.of_backward_node.get(source) or operators.of_backward_node.get(x)
    if owner is not None and owner.aten in _SOFTMAX:
        return "softmax", None
    gemm = _gemm(source, casts)
    return ("other", None) if gemm is None else ("gemm", gemm)


def _through(node: Node, *, masks: bool = False) -> Node:
    """Follow layout copies, and a ReLU's mask if ``masks``, back to the node that computed the values."""
    while True:
        if node.target in _LAYOUT or node.target is KEEP_NONFINITE:
            node = input_at(node, 0)
        elif masks and node.target in _CHOICES:
            _, a, b = node.args
            shown = b if is_zero(a) else a if is_zero(b) else None
            if not isinstance(shown, Node):
                return node
            node = shown
        else:
            return node


def is_zero(arg: object) -> bool:
    """Return whether an argument is 0 everywhere, so that it agrees with every scale."""
    if not isinstance(arg, Node):
        return isinstance(arg, int | float) and arg == 0
    while arg.target in ops.VIEWS:
        arg = input_at(arg, 0)
    if arg.target in ops.ZEROS:
        return True
    position = ops.CONSTANTS.get(arg.target)
    return position is not None and argument(arg, position) == 0


def _gemm(node: Node, casts: Mapping[Node, int]) -> GradientGemm | None:
    item = item_of(node)
    if item is not None and item[1] == 0 and item[0].target is _CONVOLUTION:
        node, positions = item[0], (0, 2)
    elif node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        positions = (0, 1)
    else:
        return None
    first, second = (_row(input_at(node, p), casts) for p in positions)
    if first is None or second is None or first[1] == second[1]:
        return None
    (gradient, _), (operand, _) = (first, second) if first[1] else (second, first)
    return GradientGemm(length=_length(node), gradient=gradient, operand=operand)


def _row(factor: Node, casts: Mapping[Node, int]) -> tuple[int, bool] | None:
    """Return (row of the table where a factor is stored, whether it is a gradient); None if it is not stored."""
    read = Dequantize.match(_through(factor))
    if read is None or is_in_blocks(read.format):
        return None
    if read.q in casts:
        return casts[read.q], True
    return None if is_backward(read.q) else (Quantize.of(read.q).row, False)


def _length(node: Node) -> int:
    """Return the accumulation length of a GEMM whose result is an input's gradient, at the traced sizes."""
    if node.target is _CONVOLUTION:
        transposed, groups = node.args[7], node.args[9]
        assert isinstance(groups, int)
        shape = _shape(input_at(node, 2))  # (out, in / groups, *kernel); transposed: (in, out / groups, *kernel)
        channels = shape[1] if transposed else shape[0] // groups
        return channels * torch.Size(shape[2:]).numel()
    return _shape(input_at(node, 0))[-1]


def _shape(node: Node) -> list[int]:
    return [dim_hint(size) for size in tensor_of(node).shape]
