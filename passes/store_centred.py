"""Store a norm's input with the mean subtracted: an error of 3 % of a large mean would exceed the variation around it.

A norm's backward starts with ``x - mean``. Computed from a stored copy of x, the difference has an error of x's size,
mean included. If the difference itself is stored, its error is of its own size. The difference has as many elements as
x, and forward computes it anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from fxprec.ir.operators import Moves, moving_as
from fxprec.ir.symbolic import Dequantize, Quantize
from fxprec.passes.analysis import ops, regions
from fxprec.passes.analysis.joint import (
    is_backward,
    numel_hint,
    operator_of,
    readers,
    same_shape,
    shown,
    tensor_of,
    value,
)
from fxprec.passes.base import Pass, Work
from fxprec.passes.sites import replace_node

_SUB = torch.ops.aten.sub.Tensor
# Any two chains of these views from one value to one shape show the same tensor.
_OF_ONE_SHAPE = moving_as(Moves.RANK, Moves.ALIAS)


@dataclass(frozen=True)
class StoreCentred(Pass):
    """Store the result of a subtraction instead of its operand, if all backward readers of the copy repeat it."""

    name: str = "store-centred"

    def apply(self, work: Work) -> None:
        graph, count = work.joint.graph, 0
        for q, cast in Quantize.among(Quantize.nodes(graph)):
            if not is_backward(q) and work.book.sites[cast.row].reads == "backward":
                count += _move(graph, q, cast)
        if count:
            what = "1 tensor is stored less its" if count == 1 else f"{count} tensors are stored less their"
            work.remarks.append(f"{what} mean, which is what backward reads")


def _move(graph: Graph, q: Node, cast: Quantize) -> bool:
    decoded = [(x, call) for x, call in Dequantize.among(q.users)]
    if len(decoded) != 1 or len(q.users) != 1 or regions.is_marked(cast.x):
        return False
    read, call = decoded[0]
    found = list(readers(read))
    if not all(is_backward(reader) and _is_centring(reader, part) for part, reader in found):
        return False
    centred = _in_forward(cast.x, [reader for _, reader in found])
    if centred is None:
        return False
    val = tensor_of(centred)
    with graph.inserting_after(centred):
        stored = graph.create_node("call_function", operator_of(q), replace(cast, x=centred).args)
    stored.meta = {**q.meta, "val": torch.empty_like(val, dtype=tensor_of(q).dtype)}
    with graph.inserting_after(stored):
        read_back = graph.create_node("call_function", operator_of(read), replace(call, q=stored).args)
    read_back.meta = {**read.meta, "val": val}
    for _, reader in found:
        replace_node(reader, read_back)
    _erase(graph, q)
    return True


def _is_centring(user: Node, read: Node) -> bool:
    """Return whether a node subtracts a smaller forward tensor, a mean, from ``read``."""
    if user.target is not _SUB or user.kwargs:
        return False
    x, mean = user.args
    if x is not read or not isinstance(mean, Node) or value(mean) is None or is_backward(_of_any_shape(mean)):
        return False
    return numel_hint(tensor_of(mean)) < numel_hint(tensor_of(read))


def _in_forward(x: Node, wanted: list[Node]) -> Node | None:
    """Return the forward subtraction that all backward nodes in ``wanted`` repeat; None if there is none."""
    for read, reader in readers(x) if wanted else ():
        if is_backward(reader) or regions.is_marked(reader) or not _is_centring(reader, read):
            continue
        if all(_is_same(reader, other) for other in wanted):
            return reader
    return None


def _is_same(a: Node, b: Node) -> bool:
    """Return whether two differences are equal: both subtract the same mean from the same views of one tensor."""
    if not same_shape(tensor_of(a), tensor_of(b)) or tensor_of(a).dtype != tensor_of(b).dtype:
        return False
    seen_a, seen_b = (
        [(view.target, view.args[1:], view.kwargs) for view in shown(n.all_input_nodes[0], _is_listed)[1]]
        for n in (a, b)
    )
    mean_a, mean_b = (n.all_input_nodes[1] for n in (a, b))
    is_one_shape = same_shape(tensor_of(mean_a), tensor_of(mean_b))
    return seen_a == seen_b and is_one_shape and _of_any_shape(mean_a) is _of_any_shape(mean_b)


def _is_listed(node: Node) -> bool:
    return node.target in ops.VIEWS


def _of_any_shape(mean: Node) -> Node:
    return shown(mean, lambda node: node.target in _OF_ONE_SHAPE)[0]


def _erase(graph: Graph, node: Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)
