"""Store a norm's input with the mean subtracted: an error of 3 % of a large mean would exceed the variation around it.

A norm's backward starts with ``x - mean``. Computed from a stored copy of x, the difference has an error of x's size,
mean included. If the difference itself is stored, its error is of its own size. The difference has as many elements as
x, and forward computes it anyway.

The backward of ``var`` and ``std`` computes the mean again, from the copy, and subtracts it. It gets forward's mean
instead, and where forward does not compute that, or the difference, this pass adds it: one more sum over x, in the loop
that computes the variance.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from fxprec.ir.operators import Moves, Trait, having, moving_as
from fxprec.ir.symbolic import Dequantize, Quantize
from fxprec.passes.analysis import ops, regions
from fxprec.passes.analysis.joint import (
    input_at,
    is_backward,
    made_by,
    numel_hint,
    operator_of,
    readers,
    same_shape,
    shown,
    tensor_of,
    value,
)
from fxprec.passes.base import Pass, Work
from fxprec.passes.compute_high import UNREAD
from fxprec.passes.sites import emit, emit_on, replace_node

_STATISTICS = having(Trait.SUMS) | {torch.ops.aten.var_mean.correction}
_SUB, _MEAN = torch.ops.aten.sub.Tensor, torch.ops.aten.mean.dim
LESS_MEAN = f"{UNREAD}: backward reads its difference from its mean, which is stored"
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
                count += _move(work, q, cast)
        if count:
            what = "1 tensor is stored less its" if count == 1 else f"{count} tensors are stored less their"
            work.remarks.append(f"{what} mean, which is what backward reads")


def _move(work: Work, q: Node, cast: Quantize) -> bool:
    decoded = [(x, call) for x, call in Dequantize.among(q.users)]
    if len(decoded) != 1 or len(q.users) != 1 or regions.is_marked(cast.x):
        return False
    read, call = decoded[0]
    means = _means(read)
    if len({str(mean.args[1:]) for mean in means}) > 1:
        return False
    if not all(is_backward(user) and _is_centring(user, part, means) for part, user in _beside(means, read)):
        return False
    for mean in means:
        replace_node(mean, _mean_in_forward(cast.x, mean))
    found = [user for _, user in readers(read)]
    centred = _in_forward(cast.x, found, set(work.book.values.values()))
    if centred is None:
        return False
    copy = _copy_of(centred)
    if copy is None:
        read_back = _stored(q, cast, read, call, centred)
    elif Quantize.of(input_at(copy, 0)).format == cast.format:
        read_back = copy
        work.book.leave_high(cast.row, LESS_MEAN)
    else:
        return False
    for reader in found:
        replace_node(reader, read_back)
    _erase(q.graph, q)
    return True


def _stored(q: Node, cast: Quantize, read: Node, call: Dequantize, centred: Node) -> Node:
    """Store a difference as ``q`` stores its operand, and return the node that decodes it."""
    graph, val = q.graph, tensor_of(centred)
    with graph.inserting_after(_behind_inputs(centred)):
        stored = graph.create_node("call_function", operator_of(q), replace(cast, x=centred).args)
    stored.meta = {**q.meta, "val": torch.empty_like(val, dtype=tensor_of(q).dtype)}
    with graph.inserting_after(stored):
        read_back = graph.create_node("call_function", operator_of(read), replace(call, q=stored).args)
    read_back.meta = {**read.meta, "val": val}
    return read_back


def _behind_inputs(node: Node) -> Node:
    """Return the node after which readers of ``node`` can be inserted: an input's come behind all inputs."""
    latest: Node = max(node, *node.graph.find_nodes(op="placeholder"))
    return latest


def _copy_of(centred: Node) -> Node | None:
    """Return the node that decodes a stored copy of a difference; None if the difference has no copy of its own."""
    decoded = [x for q, _ in Quantize.among(centred.users) for x, _ in Dequantize.among(q.users)]
    return decoded[0] if len(decoded) == 1 else None


def _means(read: Node) -> list[Node]:
    """Return the means of a decoded copy that backward computes."""
    return [user for part, user in readers(read) if user.target is _MEAN and is_backward(user) and part in user.args]


def _beside(means: Collection[Node], read: Node) -> Iterator[tuple[Node, Node]]:
    """Yield the readers of a decoded copy other than its means, each behind the node that it reads."""
    return ((part, user) for part, user in readers(read) if user not in means)


def _mean_in_forward(x: Node, mean: Node) -> Node:
    """Return the mean of a forward tensor that a backward node computes of its copy: forward's own, or a new one."""
    part = input_at(mean, 0)
    for shows, user in readers(x):
        if (
            user.target is _MEAN
            and not is_backward(user)
            and user.args[1:] == mean.args[1:]
            and _views(shows) == _views(part)
        ):
            return user
    part = _shown_in_forward(x, part)
    with x.graph.inserting_after(_behind_inputs(part)):
        return emit_on(x.graph, mean, part, x, backward=False)


def _shown_in_forward(x: Node, part: Node) -> Node:
    """Return a forward tensor seen through the views through which a backward node shows its copy."""
    shows = x
    for view in reversed(shown(part, _is_listed)[1]):
        with x.graph.inserting_after(_behind_inputs(shows)):
            shows = emit_on(x.graph, view, shows, x, backward=False)
    return shows


def _is_centring(user: Node, read: Node, means: Collection[Node] = ()) -> bool:
    """Return whether a node subtracts a smaller tensor, a mean of forward's or of ``means``, from ``read``."""
    if user.target is not _SUB or user.kwargs:
        return False
    x, mean = user.args
    if x is not read or not isinstance(mean, Node) or value(mean) is None:
        return False
    source = _of_any_shape(mean)
    is_known = source in means or not is_backward(source)
    return is_known and numel_hint(tensor_of(mean)) < numel_hint(tensor_of(read))


def _in_forward(x: Node, wanted: list[Node], counted: Collection[Node]) -> Node | None:
    """Return the forward subtraction that all backward nodes in ``wanted`` repeat; None if they are not the same.

    If forward has none, it is added. If it has several, as two norms of one tensor make, the first one takes the place
    of the others that have no site of their own (``counted`` have one).
    """
    if not wanted or not all(_is_same(wanted[0], other) for other in wanted):
        return None
    ours = [(part, user) for part, user in readers(x) if not (is_backward(user) or regions.is_marked(user))]
    found = [user for part, user in ours if _is_centring(user, part) and _is_same(user, wanted[0])]
    if found:
        first = min(found)
        for other in found:
            if other is not first and other not in counted:
                replace_node(other, first)
        return first
    part, mean = wanted[0].all_input_nodes
    part, mean = _shown_in_forward(x, part), _shown_in_forward(_of_any_shape(mean), mean)
    with x.graph.inserting_after(_behind_inputs(max(part, mean))):
        return emit(x.graph, _SUB, (part, mean), x, backward=False)


def _is_same(a: Node, b: Node) -> bool:
    """Return whether two differences are equal: both subtract the same mean from the same views of one tensor."""
    if not same_shape(tensor_of(a), tensor_of(b)) or tensor_of(a).dtype != tensor_of(b).dtype:
        return False
    seen_a, seen_b = (_views(n.all_input_nodes[0]) for n in (a, b))
    mean_a, mean_b = (n.all_input_nodes[1] for n in (a, b))
    is_one_shape = same_shape(tensor_of(mean_a), tensor_of(mean_b))
    return seen_a == seen_b and is_one_shape and _is_same_mean(_of_any_shape(mean_a), _of_any_shape(mean_b))


def _is_same_mean(a: Node, b: Node) -> bool:
    """Return whether two nodes compute the same statistic of one tensor, as those of two norms of it do."""
    if a is b:
        return True
    (x, of_a), (y, of_b) = shown(a, _is_of_statistic), shown(b, _is_of_statistic)
    return x is y and len(of_a) == len(of_b) and all(_is_same_call(m, n) for m, n in zip(of_a, of_b, strict=True))


def _is_of_statistic(node: Node) -> bool:
    return node.target in _STATISTICS or made_by(node).target in _STATISTICS or _is_listed(node)


def _is_same_call(a: Node, b: Node) -> bool:
    return (a.target, a.args[1:], a.kwargs) == (b.target, b.args[1:], b.kwargs)


def _views(node: Node) -> list[tuple[object, ...]]:
    return [(view.target, view.args[1:], view.kwargs) for view in shown(node, _is_listed)[1]]


def _is_listed(node: Node) -> bool:
    return node.target in ops.VIEWS


def _of_any_shape(mean: Node) -> Node:
    return shown(mean, lambda node: node.target in _OF_ONE_SHAPE)[0]


def _erase(graph: Graph, node: Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)
