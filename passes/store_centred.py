"""Store a norm's input less its mean: an error of 3 % of a large mean would exceed the variation around the mean.

A norm's backward starts with ``x - mean``. Computed from a stored copy of x, the difference has an error of x's size,
mean included. Stored itself, the difference has an error of its own size. It has as many elements as x, and forward
computes it anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from fxprec.ir.operators import Moves, moving_as
from fxprec.ir.symbolic import Dequantize, Quantize
from fxprec.passes.analysis import ops, regions
from fxprec.passes.analysis.joint import is_backward, is_view, numel_hint, operator_of, tensor_of, value
from fxprec.passes.base import Work

_SUB = torch.ops.aten.sub.Tensor
# Where two of these lead to the same shape from the same value, they show the same.
_OF_ONE_SHAPE = moving_as(Moves.RANK, Moves.ALIAS)


@dataclass(frozen=True)
class StoreCentred:
    """Store the result of a subtraction instead of its operand, where all readers in backward begin with it."""

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
    readers = _subtractions(read, backward=True)
    centred = None if readers is None else _in_forward(cast.x, readers)
    if readers is None or centred is None:
        return False
    val = tensor_of(centred)
    with graph.inserting_after(centred):
        stored = graph.create_node("call_function", operator_of(q), replace(cast, x=centred).args)
    stored.meta = {**q.meta, "val": torch.empty_like(val, dtype=tensor_of(q).dtype)}
    with graph.inserting_after(stored):
        again = graph.create_node("call_function", operator_of(read), replace(call, q=stored).args)
    again.meta = {**read.meta, "val": val}
    for reader in readers:
        reader.replace_all_uses_with(again)
        graph.erase_node(reader)
    _erase(graph, q)
    return True


def _subtractions(node: Node, *, backward: bool) -> list[Node] | None:
    """Return what reads a value in one half, seen through views; None where that is not only ``value - smaller``."""
    found: list[Node] = []
    for user in node.users:
        if is_view(user):
            behind = _subtractions(user, backward=backward)
            if behind is None:
                return None
            found += behind
        elif is_backward(user) != backward or not _is_centring(user, node):
            return None
        else:
            found.append(user)
    return found


def _is_centring(user: Node, shown: Node) -> bool:
    """Say whether a node subtracts from ``shown`` something smaller of the forward half."""
    if user.target is not _SUB or user.kwargs:
        return False
    x, mean = user.args
    if (
        x is not shown
        or not isinstance(mean, Node)
        or value(mean) is None
        or is_backward(_seen(mean, _OF_ONE_SHAPE)[0])
    ):
        return False
    return numel_hint(tensor_of(mean)) < numel_hint(tensor_of(shown))


def _in_forward(x: Node, readers: list[Node]) -> Node | None:
    """Return the one difference of forward that all of ``readers`` compute again."""
    known = [
        node
        for node in _differences(x)
        if readers and all(_is_same(node, reader) for reader in readers) and not regions.is_marked(node)
    ]
    return known[0] if known else None


def _differences(x: Node) -> list[Node]:
    found: list[Node] = []
    for user in x.users:
        if is_backward(user):
            continue
        if is_view(user):
            found += _differences(user)
        elif _is_centring(user, x):
            found.append(user)
    return found


def _is_same(a: Node, b: Node) -> bool:
    """Say whether two differences are equal: the same views of two copies of one tensor, less the same mean."""
    if tensor_of(a).shape != tensor_of(b).shape or tensor_of(a).dtype != tensor_of(b).dtype:
        return False
    (_, seen_a), (_, seen_b) = (_seen(n.all_input_nodes[0], ops.VIEWS) for n in (a, b))
    mean_a, mean_b = (n.all_input_nodes[1] for n in (a, b))
    same_shape = tensor_of(mean_a).shape == tensor_of(mean_b).shape
    return seen_a == seen_b and same_shape and _seen(mean_a, _OF_ONE_SHAPE)[0] is _seen(mean_b, _OF_ONE_SHAPE)[0]


def _seen(node: Node, views: Collection[object]) -> tuple[Node, list[object]]:
    """Return the value that a node shows through ``views``, and those views."""
    path: list[object] = []
    while node.target in views and len(node.all_input_nodes) == 1:
        path.append((node.target, node.args[1:], node.kwargs))
        node = node.all_input_nodes[0]
    return node, path


def _erase(graph: Graph, node: Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)
