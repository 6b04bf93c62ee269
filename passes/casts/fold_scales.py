"""Take the scale off a parameter's gradient where an operand is decoded, which costs nothing.

dW = X^T (a dZ) / a equals (X / a)^T (a dZ): where X is read back from its stored copy for this GEMM, the division
goes into the decode. It is exact, a power of two in a dtype with float32's range.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch.fx import Graph, Node

from fxprec.ir import symbolic
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import is_backward, numel_hint, value
from fxprec.passes.casts.sites import emit

_MATMULS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.bmm.default})
_CONVOLUTION = torch.ops.aten.convolution_backward.default
_WEIGHT_GRADIENT = 1  # position among the results of convolution_backward; also of its input among its arguments


def fold_into_decodes(graph: Graph, unscaled: Iterable[Node], row_of_inverse: Callable[[Node], int]) -> None:
    """Replace each rescale of ``unscaled`` whose GEMM can do it; the others stay.

    ``row_of_inverse`` gives the row whose exponent is that of a rescale, negated: a dequantize divides.
    """
    for node in unscaled:
        x, table, _ = node.args
        assert isinstance(x, Node)
        found = _operand(x) if set(x.users) == {node} else None
        if found is None:
            continue
        gemm, position = found
        operand = gemm.args[position]
        assert isinstance(operand, Node)
        if not _is_cheaper(operand, x):
            continue
        with graph.inserting_before(gemm):
            new = _decoded_with(graph, operand, row_of_inverse(node), table)
        gemm.update_arg(position, new)
        node.replace_all_uses_with(x)
        graph.erase_node(node)


def _operand(x: Node) -> tuple[Node, int] | None:
    """Return the GEMM that makes gradient ``x`` and the position of its stored forward operand."""
    if x.target is operator.getitem and x.args[1] == _WEIGHT_GRADIENT:
        gemm = x.args[0]
        assert isinstance(gemm, Node)
        candidates = [_WEIGHT_GRADIENT] if gemm.target is _CONVOLUTION else []
    elif x.target in _MATMULS:
        gemm, candidates = x, [0, 1]
    else:
        return None
    found = [p for p in candidates if _decode(gemm.args[p]) is not None]
    return (gemm, found[0]) if len(found) == 1 else None


def _decode(arg: object) -> Node | None:
    """Return the dequantize of a stored forward value behind ``arg``'s views, or None."""
    while isinstance(arg, Node) and arg.target in ops.VIEWS:
        arg = arg.args[0]
    if not isinstance(arg, Node) or arg.target is not symbolic.DEQUANTIZE or arg.args[2] != symbolic.AS_STORED:
        return None
    q, storage = arg.args[0], arg.args[4]
    assert isinstance(q, Node)
    val = value(arg)
    assert val is not None
    return None if storage == "simulate" or is_backward(q) or val.dtype == torch.float16 else arg


def _is_cheaper(operand: Node, gradient: Node) -> bool:
    """A decode of its own beats a pass over the gradient where it is the only one, or reads fewer elements."""
    decode = _decode(operand)
    assert decode is not None
    stored, result = value(decode), value(gradient)
    assert stored is not None
    assert result is not None
    return len(_backward_readers(decode)) == 1 or numel_hint(stored) < numel_hint(result)


def _backward_readers(decode: Node) -> set[Node]:
    """Return the backward nodes that read a decoded value, through views."""
    found: set[Node] = set()
    stack = list(decode.users)
    while stack:
        user = stack.pop()
        if user.target in ops.VIEWS:
            stack.extend(user.users)
        elif is_backward(user):
            found.add(user)
    return found


def _decoded_with(graph: Graph, node: Node, row: int, table: object) -> Node:
    """Copy the views from ``node`` down to its dequantize, which then divides by the scale of ``row``."""
    if node.target is symbolic.DEQUANTIZE:
        q, _, _, fmt, storage, dtype = node.args
        return emit(graph, node.target, (q, table, row, fmt, storage, dtype), node, backward=True, val=node.meta["val"])
    source = node.args[0]
    assert isinstance(source, Node)
    inner = _decoded_with(graph, source, row, table)
    view = emit(graph, node.target, (inner, *node.args[1:]), node, backward=True, val=node.meta["val"])
    view.kwargs = node.kwargs  # a clone's memory format
    return view
