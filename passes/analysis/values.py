"""Decide which values passes may store, round, rescale or narrow: `is_plain_float` is the one predicate for all passes.

Passes store, round, rescale or narrow plain floating-point tensors: real numbers in float32, bfloat16 or float16, dense
and strided. Every other value keeps the model's own precision: complex numbers, float64, integers, a user's own 8-bit
floats, sparse layouts, masks and effect tokens (empty tensors that order side effects). So do results that a collective
has not delivered yet: before ``wait_tensor`` the memory has undefined content.

A mask is a tensor that contains fill values by construction, ``where(allowed, 0, -inf)``. A fill value marks a place;
its size means nothing. As numbers, fill values overflow every narrow format, so the tensor would be promoted in the
first step. float32's least number becomes -inf in bfloat16, and a row that is masked as a whole becomes NaN.

No pass touches a divisor: a value that the model or its backward divides by, or takes the root or logarithm of. In 8
bits a small divisor is 0 (the mean square of Llama's embeddings is, in e4m3fn), and inf and NaN follow. No pass touches
log-softmax's result either. Its backward exponentiates it: in e4m3fn a probability would be off by a factor of up to
1.28.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping

import torch
from torch.fx import Graph, Node

from fxprec.ir.operators import Trait, column, having
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import argument, input_at, is_backward, value
from fxprec.passes.analysis.marks import mark, marks

aten = torch.ops.aten

# The smallest magnitude of a mask's fill. BERT's original -1e4 is the smallest in use. Fills that are data (a padding
# value, an ignored index, a clamp) are far smaller.
MASK_FILL = 1e4

# Operators whose result keeps the fill values of any argument, or of the first: layout, casts, choice, sums, products.
# Every other operator (softmax, a GEMM, a comparison) turns fill values into ordinary numbers.
_HANDS_ON = column("hands_on")
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
# The position of an operator's divisor, and operators whose result is 0, or nearly, where their first argument is 0.
_DIVIDES: Mapping[object, int] = column("divisor_at")
_SHIFTING = having(Trait.HANDS_ON_DIVISOR)
_REDUCING = having(Trait.SUMS) - {ops.prims.sum.default}
_LARGEST = frozenset(torch.finfo(dtype).max for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16))


def is_plain_float(node: Node) -> bool:
    """Return whether a pass may touch the value of ``node``: store, round, rescale or narrow it."""
    return is_float_tensor(node) and not is_mask(node) and not marks(node).is_untouchable


def is_float_tensor(node: Node) -> bool:
    """Return whether ``node`` is a dense float tensor, or a mask or divisor, whose gradients are ordinary."""
    val = value(node)
    if val is None or val.dtype not in ops.FLOATS or val.layout is not torch.strided or marks(node).is_under_way:
        return False
    return not val.is_neg() and not _is_empty(val)


def is_differentiable(node: Node) -> bool:
    """Return whether a gradient can flow through the value, whether or not a pass may touch it."""
    val = value(node)
    return val is not None and (val.dtype.is_floating_point or val.dtype.is_complex) and not _is_empty(val)


def _is_empty(val: torch.Tensor) -> bool:
    return any(isinstance(size, int) and size == 0 for size in val.shape)


def is_mask(node: Node) -> bool:
    """Return whether the value contains mask fills by construction. `mark_masks` must have run over the graph."""
    return marks(node).is_mask


def mark_values(graph: Graph, *, stored: bool = True) -> None:
    """Mark the masks, divisors and undelivered results of collectives in a joint graph, for `is_plain_float`.

    If ``stored``, log-softmax's result is marked too; simulation rounds it, as the paper does.
    """
    mark_masks(graph)
    for target in ops.WAITS:
        for node in graph.find_nodes(op="call_function", target=target):
            _mark_under_way(input_at(node, 0))
    for node in graph.nodes:
        if (position := _DIVIDES.get(node.target)) is not None:
            _mark_untouchable(argument(node, position))
        elif _is_root(node) or (stored and _is_of_log_softmax(node)):
            _mark_untouchable(input_at(node, 0))


def _is_root(node: Node) -> bool:
    """Return whether a node raises to a power that is infinite at 0, or whose derivative is infinite at 0."""
    power = argument(node, 1) if node.target is aten.pow.Tensor_Scalar else None
    return isinstance(power, int | float) and power < 1


def _is_of_log_softmax(node: Node) -> bool:
    """Return whether a node of log-softmax's backward exponentiates the result."""
    return node.target is aten.exp.default and (
        str(node.meta.get("original_aten")) == "aten._log_softmax_backward_data.default"
    )


def _mark_untouchable(arg: object) -> None:
    """Mark a divisor or a result of log-softmax, and its sources up to a tensor whose zeros do not make it 0."""
    while isinstance(arg, Node) and not marks(arg).is_untouchable:
        if not is_backward(arg):
            mark(arg, is_untouchable=True)
        first, *others = arg.args or (None,)
        handed_on = arg.target in _SHIFTING and not any(isinstance(other, Node) for other in others)
        if arg.target in _REDUCING:
            handed_on = _is_square(first)
        arg = first if handed_on else None


def _mark_under_way(arg: object) -> None:
    """Mark the operand of a collective's wait, its sources through views, and the operator that returned it."""
    while isinstance(arg, Node) and arg.op == "call_function":
        mark(arg, is_under_way=True)
        arg = input_at(arg, 0) if arg.target in ops.VIEWS or arg.target is operator.getitem else None


def _is_square(arg: object) -> bool:
    if not isinstance(arg, Node):
        return False
    if arg.target is aten.pow.Tensor_Scalar:
        return argument(arg, 1) == 2
    return arg.target in _PRODUCTS and len({*arg.args}) == 1


def mark_masks(graph: Graph) -> None:
    """Mark the tensors that contain mask fills, by following fill constants through the graph."""
    data: set[Node] = set()  # computed from floating-point inputs: the numbers are data
    for node in graph.nodes:
        if node.op == "placeholder":
            if is_differentiable(node):
                data.add(node)
        elif node.op == "call_function":
            if any(n in data for n in node.all_input_nodes):
                data.add(node)
            if is_differentiable(node) and _holds_fill(node, data):
                mark(node, is_mask=True)


def _holds_fill(node: Node, data: Collection[Node]) -> bool:
    position = ops.FILLS.get(node.target)
    if position is not None and _is_fill(argument(node, position)):
        return True
    if node.target in _PRODUCTS:
        a, b = node.args
        for factor, other in ((_constant(a), b), (_constant(b), a)):
            if factor is not None:
                return (_is_fill(factor) and _makes_fills(factor, other, data)) or _was_mask(other)
    handed_on = _HANDS_ON.get(node.target)
    if handed_on == "any":
        return any(is_mask(n) for n in node.all_input_nodes)
    return handed_on == "first" and _was_mask(argument(node, 0))


def _was_mask(arg: object) -> bool:
    return isinstance(arg, Node) and is_mask(arg)


def _is_fill(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and abs(number) >= MASK_FILL


def _constant(arg: object) -> float | None:
    """Return the number that an argument is or is filled with, seen through views and casts, or None."""
    while isinstance(arg, Node) and (arg.target in ops.VIEWS or arg.target in ops.CASTS):
        arg = input_at(arg, 0)
    if isinstance(arg, Node):
        position = ops.CONSTANTS.get(arg.target)
        arg = None if position is None else argument(arg, position)
    return arg if isinstance(arg, int | float) else None


def _makes_fills(factor: float, other: object, data: Collection[Node]) -> bool:
    """Return whether a product is like ``(1 - keep) * -1e9``: a large constant times a value without data.

    Data times a large constant is a scale, unless the constant is infinite or a dtype's least number.
    """
    return other not in data or math.isinf(factor) or abs(factor) in _LARGEST
