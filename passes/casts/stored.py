"""Insert casts for native and packed storage: where a tensor is written to memory, and nowhere else.

Definitions: docs/algorithms.md, "Where rounding happens".

Sites are the operands and results of GEMMs, forward values that backward reads, and the gradients that backward GEMMs
multiply. A tensor that fusion keeps in registers is not rounded: rounding would cost accuracy and save nothing. For the
same reason a parameter gets a site only if a GEMM multiplies it. A parameter's gradient gets none: it leaves the graph
in the parameter's own dtype.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch.fx import Node

from fxprec.passes.analysis import ops
from fxprec.passes.analysis.groups import Grouped
from fxprec.passes.analysis.joint import factors_of, input_at, is_backward, tensor_of, value
from fxprec.passes.analysis.operators import Operator
from fxprec.passes.analysis.tensors import CountedTensor
from fxprec.passes.analysis.values import is_plain_float
from fxprec.passes.sites import SiteBook, replace_uses

# A tensor that only backward reads, and that is this much smaller than its group's largest, is a statistic (a norm's
# mean, a softmax's maximum). Rounding it saves nothing, and its error reaches every element of the large tensor.
STATISTIC = 16


def insert_stored_casts(grouped: Grouped, book: SiteBook) -> None:
    """Insert quantize and dequantize nodes into both halves of the joint graph."""
    _cast_forward(grouped, book)
    gradients = grouped.operators.joint.made_of_tangents()
    for op in grouped.gemms:
        _cast_incoming_gradient(op, grouped, book, gradients)


def _cast_forward(grouped: Grouped, book: SiteBook) -> None:
    largest = _largest_by_group(grouped)
    made_by = grouped.operators.of_node
    for node, tensor in grouped.values.items():
        if _is_written(tensor, largest) and not book.is_identity(tensor, tensor_of(node).dtype):
            book.store_result(node, tensor, inside=made_by[node].nodes if node in made_by else ())


def _largest_by_group(grouped: Grouped) -> dict[int, int]:
    largest: dict[int, int] = {}
    for tensor in grouped.tensors:
        largest[tensor.group] = max(largest.get(tensor.group, 0), tensor.elements)
    return largest


def _is_written(tensor: CountedTensor, largest: dict[int, int]) -> bool:
    if tensor.kind == "param":
        return tensor.feeds_gemm
    if tensor.feeds_gemm or tensor.of_gemm:
        return True
    return tensor.saved and tensor.elements * STATISTIC > largest[tensor.group]


def _cast_incoming_gradient(op: Operator, grouped: Grouped, book: SiteBook, gradients: Container[Node]) -> None:
    """Store the gradient that a GEMM's backward multiplies once, for all nodes of that backward.

    Under autocast each product may convert the gradient separately. Then each conversion is stored.
    """
    tensor = next((grouped.grads[n] for n in op.outputs if n in grouped.grads), None)
    if tensor is None:
        return
    inside = set(op.backward)
    readers: dict[Node, list[Node]] = {}
    for gradient, reader in _multiplied_gradients(op, gradients):
        readers.setdefault(gradient, []).append(reader)
    for gradient, gemms in readers.items():
        val = value(gradient)
        if val is None or not is_plain_float(gradient) or book.is_identity(tensor, val.dtype):
            continue
        users = [u for u in gradient.users if u in inside or u in gemms]
        with book.graph.inserting_before(min(users)):
            q, x = book.store(gradient, tensor, backward=True)
        replace_uses(gradient, x, [u for u in users if u is not q])


def _multiplied_gradients(op: Operator, gradients: Container[Node]) -> Iterator[tuple[Node, Node]]:
    """Yield (gradient below views, node that reads it) for each gradient that a backward GEMM multiplies."""
    for node in op.backward:
        if node.target not in ops.GEMMS_BACKWARD:
            continue
        for factor in factors_of(node):
            reader, source = node, factor
            while source.target in ops.VIEWS and is_backward(source):
                reader, source = source, input_at(source, 0)
            if source in gradients:  # not a forward value that backward converts
                yield source, reader
