"""Take the scale off a parameter's gradient in the decode of an operand, which costs nothing.

dW = X^T (a dZ) / a equals (X / a)^T (a dZ). If X is read back from its stored copy for this GEMM, the decode divides by
a. The division is exact: a is a power of two, and the dtype has float32's range.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from fxprec.ir.symbolic import Dequantize, Rescale
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import argument, input_at, is_backward, item_of, numel_hint, readers, tensor_of
from fxprec.passes.sites import emit_call, emit_on, replace_node

_MATMULS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.bmm.default})
_CONVOLUTION = torch.ops.aten.convolution_backward.default
_WEIGHT_GRADIENT = 1  # position among convolution_backward's results, and of its input among its arguments


def fold_into_decodes(
    graph: Graph, unscaled: Iterable[Node], row_of_inverse: Callable[[Node], int], over_codes: Container[Node]
) -> None:
    """Fold each rescale of ``unscaled`` into its GEMM's operand where that is cheaper; leave the others.

    ``row_of_inverse`` returns the row with a rescale's negated exponent, since a dequantize divides. GEMMs
    ``over_codes`` decode nothing, and take off a scale of each operand at no cost.
    """
    for node in unscaled:
        rescale = Rescale.of(node)
        x = rescale.g
        place = _operand(x) if set(x.users) == {node} else None
        if place is None:
            continue
        gemm, position = place
        operand = input_at(gemm, position)
        if gemm not in over_codes and not _is_cheaper(operand, x):
            continue
        with graph.inserting_before(gemm):
            new = _decoded_with(graph, operand, row_of_inverse(node), rescale.table)
        gemm.update_arg(position, new)
        replace_node(node, x)


def _operand(x: Node) -> tuple[Node, int] | None:
    """Return the GEMM that computes gradient ``x`` and the position of its stored forward operand, or None."""
    item = item_of(x)
    if item is not None and item[1] == _WEIGHT_GRADIENT:
        gemm = item[0]
        candidates = [_WEIGHT_GRADIENT] if gemm.target is _CONVOLUTION else []
    elif x.target in _MATMULS:
        gemm, candidates = x, [0, 1]
    else:
        return None
    decoded = [p for p in candidates if _decode(argument(gemm, p)) is not None]
    return (gemm, decoded[0]) if len(decoded) == 1 else None


def _decode(arg: object) -> Node | None:
    """Return the dequantize of a stored forward value behind ``arg``'s views, or None."""
    while isinstance(arg, Node) and arg.target in ops.VIEWS:
        arg = input_at(arg, 0)
    read = Dequantize.match(arg)
    if not isinstance(arg, Node) or read is None or not read.is_as_stored or read.is_simulated:
        return None
    return None if is_backward(read.q) or tensor_of(arg).dtype == torch.float16 else arg


def _is_cheaper(operand: Node, gradient: Node) -> bool:
    """Return whether a decode that divides beats a pass over the gradient: it is the only decode, or it is smaller."""
    decode = _decode(operand)
    if decode is None:
        return False
    found = {reader for _, reader in readers(decode, lambda user: user.target in ops.VIEWS) if is_backward(reader)}
    return len(found) == 1 or numel_hint(tensor_of(decode)) < numel_hint(tensor_of(gradient))


def _decoded_with(graph: Graph, node: Node, row: int, table: Node) -> Node:
    """Repeat the views from ``node`` down to its dequantize, which then divides by the scale of ``row``."""
    read = Dequantize.match(node)
    if read is not None:
        return emit_call(graph, replace(read, table=table, row=row), node, backward=True, val=node.meta["val"])
    inner = _decoded_with(graph, input_at(node, 0), row, table)
    return emit_on(graph, node, inner, backward=True, val=node.meta["val"])  # a clone's memory format too
