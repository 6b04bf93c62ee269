"""Predict how a node of a joint graph is compiled, and from that its memory and its time."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch.fx import Node

from fxprec import compat
from fxprec.config.processor import Processor
from fxprec.ir.grouped import GroupedMm
from fxprec.ir.operators import Cost, Trait, having, those
from fxprec.ir.symbolic import DEQUANTIZE, QUANTIZE, is_in_blocks
from fxprec.kernels.wide_gemms import WIDE
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import (
    argument,
    bytes_of,
    dim_hint,
    factors_of,
    has_tag,
    is_view,
    made_by,
    numel_hint,
    tensor_of,
    value,
)
from fxprec.passes.analysis.replay.workspace import workspace
from fxprec.passes.analysis.wide_gemms import is_widened

aten = torch.ops.aten


class Kind(Enum):
    """How a node's result gets into memory, if it does."""

    FREE = "free"  # an input or a number: takes no memory of the step's own
    VIEW = "view"  # shows another node's memory
    FUSED = "fused"  # pointwise: fuses with its reader's loop, if there is only one
    REDUCED = "reduced"  # a reduction loop that writes its result to memory; pointwise nodes before it fuse with it
    EXTERN = "extern"  # a library's kernel, which reads its operands from memory and writes its result there
    PIECE = "piece"  # one result of a kernel that has several


_REDUCED = those(lambda spec: spec.cost is Cost.REDUCED)
_FUSED = those(lambda spec: spec.cost in (Cost.FUSED, Cost.LIGHT))
LIGHT = those(lambda spec: spec.cost is Cost.LIGHT)
HEAVY = having(Trait.HEAVY)


def kind_of(node: Node) -> Kind:
    """Return how a node is compiled."""
    if node.op != "call_function" or node.target in ops.MUTATIONS:
        return Kind.FREE
    if isinstance(node.meta.get("val"), dict):  # a generated kernel, its results by name
        return Kind.EXTERN
    if node.target is operator.getitem and not isinstance(node.args[1], int):
        return Kind.PIECE
    if node.target is operator.getitem:
        return Kind.VIEW if is_view(node) else Kind.PIECE
    if value(node) is None and not isinstance(node.meta.get("val"), list | tuple):
        return Kind.FREE
    if node.target in ops.VIEWS and node.target not in ops.COPIES:
        return Kind.VIEW
    if node.target in _REDUCED:
        return Kind.REDUCED
    if value(node) is None:
        return Kind.EXTERN  # a library's kernel with several results
    is_fused = node.target in _FUSED and not is_in_blocks(node)
    if is_fused or has_tag(node, torch.Tag.pointwise) or _writes_on_constant(node):
        return Kind.FUSED
    return Kind.EXTERN


def is_aligned(node: Node) -> bool:
    """Return whether each element of a result depends on the elements at the same place of the operands alone."""
    if kind_of(node) is Kind.VIEW:
        shown, val = value(node.all_input_nodes[0]), value(node)
        if shown is None or val is None or bytes_of(shown) != bytes_of(val):
            return False
        return _is_row_major(shown) and _is_row_major(val)
    is_cast = node.target in (*ops.CASTS, QUANTIZE, DEQUANTIZE)
    return is_cast or has_tag(node, torch.Tag.pointwise)


def _is_row_major(val: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous at the traced sizes; asking the tensor would guard on its sizes."""
    wanted = 1
    for size, stride in zip(reversed(val.shape), reversed(val.stride()), strict=True):
        if dim_hint(size) != 1 and dim_hint(stride) != wanted:
            return False
        wanted *= dim_hint(size)
    return True


def _writes_on_constant(node: Node) -> bool:
    """Return whether a node writes a number into one place of each row of a constant: Inductor makes comparisons."""
    written = node.args[0] if node.target is aten.scatter.value else None
    return isinstance(written, Node) and written.target is aten.full.default


def result_bytes(node: Node) -> int:
    """Return the bytes of a node's result at the traced sizes; 0 if the result is not a tensor."""
    val = value(node)
    return 0 if val is None else bytes_of(val)


def workspace_of(node: Node, processor: Processor) -> int:
    """Return the bytes that a node's kernel allocates while it runs on a processor, beside its result."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    vals = (value(arg) for arg in node.args if isinstance(arg, Node))
    target = WIDE[node.target] if is_widened(node, processor) else node.target
    return workspace(target._schema.name, [val for val in vals if val is not None], processor.threads)


def can_repeat(node: Node) -> bool:
    """Return whether computing a node again gives the same result: no random numbers, no side effect, no write.

    Decisions about numbers are not repeated, because the numbers may be rounded the second time: an order, a maximum's
    position, a comparison. Stored copies are not repeated either: their statistics are counted where they are made.
    """
    if (
        node.target is QUANTIZE
        or node.op != "call_function"
        or node.is_impure(impure_random=False)  # `draws` finds random nodes more exactly
        or node.target in ops.MUTATIONS
        or _decides(made_by(node))
    ):
        return False
    if draws(node) or draws(made_by(node)):
        return False
    target = made_by(node).target
    return isinstance(target, torch._ops.OpOverload) or target is compat.TritonCalls.target


def is_square(node: Node) -> bool:
    """Return whether a node multiplies a value by itself, which doubles the value's relative error."""
    is_product = node.target is ops.aten.mul.Tensor and node.args[0] is node.args[1]
    return is_product or node.target is ops.aten.pow.Tensor_Scalar


def draws(node: Node) -> bool:
    """Return whether a node draws random numbers. Attention is tagged as random, but draws none without dropout."""
    if not has_tag(node, torch.Tag.nondeterministic_seeded):
        return False
    target: Any = node.target
    for i, parameter in enumerate(target._schema.arguments):
        if parameter.name == "dropout_p":
            return node.kwargs.get("dropout_p", argument(node, i, parameter.default_value)) != 0
    return True


def _decides(node: Node) -> bool:
    """Return whether a node computes integers or booleans from floats; attention's integers are its random state."""
    if node.op != "call_function" or node.target in ops.ATTENTION:
        return False
    val = node.meta.get("val")
    made = [v for v in (val if isinstance(val, list | tuple) else [val]) if isinstance(v, torch.Tensor)]
    reads = [v for v in map(value, node.all_input_nodes) if v is not None]
    return any(not _is_number(v) for v in made) and any(_is_number(v) for v in reads)


def _is_number(val: torch.Tensor) -> bool:
    return val.dtype.is_floating_point or val.dtype.is_complex


def flops_of(node: Node) -> float:
    """Return the floating-point operations of a GEMM, a convolution or an attention; 0 for any other node."""
    if node.target in ops.ATTENTION | ops.ATTENTION_BACKWARD:
        query, key, values = (tensor_of(n) for n in factors_of(node)[-3:])
        width, wide = (dim_hint(x.shape[-1]) for x in (key, values))
        # Forward computes scores and a mean of values. Backward computes the scores again, and each gradient.
        each = width + wide if node.target in ops.ATTENTION else 3 * width + 2 * wide
        return 2.0 * numel_hint(query) // max(width, 1) * dim_hint(key.shape[-2]) * each
    if node.target in (aten.convolution.default, aten.convolution_backward.default):
        return _flops_of_convolution(node)
    if node.target in ops.GEMMS | ops.GEMMS_BACKWARD:
        first = tensor_of(factors_of(node)[0])
        val = value(node)
        # A grouped product that sums over tokens computes a matrix for each group from the group's own tokens.
        groups = dim_hint(val.shape[0]) if node.target is GroupedMm.target and val is not None and val.ndim == 3 else 1
        return 0.0 if val is None else 2.0 * numel_hint(val) * dim_hint(first.shape[-1]) / max(groups, 1)
    return 0.0


def _flops_of_convolution(node: Node) -> float:
    source, weight = (tensor_of(factor) for factor in factors_of(node)[-2:])
    is_forward = node.target is aten.convolution.default
    is_transposed = bool(argument(node, 6 if is_forward else 7))
    out = tensor_of(node if is_forward else factors_of(node)[0])
    each = numel_hint(weight) // max(dim_hint(weight.shape[0]), 1)
    mask = (True,) if is_forward else argument(node, 10)
    assert isinstance(mask, Sequence)
    return 2.0 * numel_hint(source if is_transposed else out) * each * sum(mask[:2])
