"""Find the saved values that 8 bits would spoil, with the reason.

Backward reads a saved value through one formula. If the formula is linear in the value, an error of 6 % (e4m3fn) is an
error of 6 % in a summand. Errors of many summands cancel. Otherwise the error is multiplied or does not cancel. Such a
value keeps the recipe's high format, or its own dtype if 16 bits spoil it too. The same holds for a statistic, one
number that many elements are multiplied by, and for what only the loss is computed from (`losses`). No pass touches
divisors, nor log-softmax's result, which backward exponentiates (`values`).

The table is measured (`fxprec.ir.operators.measured`). Reasons given by hand are tested one by one
(tests/passes/test_sensitive.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from fxprec.ir.operators import HighReason, Trait, column, having
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.groups import Grouped
from fxprec.passes.analysis.joint import argument, has_tag, is_backward, numel_hint, readers, tensor_of, value
from fxprec.passes.analysis.losses import leading_to_loss, shared_with_loss
from fxprec.passes.analysis.operators import Operator, Operators
from fxprec.passes.analysis.tensors import CountedTensor
from fxprec.plan.lines import named

# By operator name: the reason why the result, or an operand, stays above 8 bits if the operator's backward reads it.
RESULTS: Mapping[str, HighReason] = {str(operator): reason for operator, reason in column("result").items()}
OPERANDS: Mapping[str, HighReason] = {str(operator): reason for operator, reason in column("operands").items()}
# Operators whose backward tolerates 8 bits in the values that it reads, as GEMMs do. Values that the backward of any
# other operator reads keep their own dtype.
HARMLESS = frozenset(map(str, having(Trait.BEARS_ROUNDING)))

EXPONENTIATED_OPERANDS: Mapping[object, tuple[int, ...]] = column("exponentiates")
EXPONENTIATED = HighReason("backward exponentiates it: an error of 0.5 in the exponent is a factor of 1.6")
STATISTIC = HighReason(
    "it is a statistic: its rounding error would reach every element that it is broadcast to, and storing it costs "
    "little",
    as_it_is=True,
)
UNKNOWN = HighReason("no measurement shows how rounding would affect the backward that reads it", as_it_is=True)
COMPARED = HighReason(
    "backward compares it for equality with another value: a rounded copy equals it nowhere, and 0 / 0 is NaN",
    as_it_is=True,
)
SUBTRACTED = HighReason(
    "backward subtracts it from another value, as a loss of two features does: if they are nearly equal, the rounding "
    "errors of 8 bits are larger than the difference"
)
SHARED = HighReason(
    "a loss's backward reads it: near convergence the loss's gradient is a small difference of such values"
)
LOSS = HighReason(
    "only the loss is computed from it, whose gradient near convergence is a small difference of such values",
    as_it_is=True,
)


def reasons_high(grouped: Grouped) -> dict[int, HighReason]:
    """Return why counted forward tensors stay above 8 bits when they are saved, by id.

    If a tensor has several reasons, the first that requires the tensor's own dtype is returned, or else the first.
    """
    reasons = _Reasons(grouped)
    found: dict[int, HighReason] = {}
    for node, tensor in grouped.values.items():
        known = list(reasons.of(node, tensor))
        if known:
            found[tensor.id] = next((reason for reason in known if reason.as_it_is), known[0])
    return found


class _Reasons:
    """The reasons why tensors of one graph stay above 8 bits."""

    def __init__(self, grouped: Grouped) -> None:
        self.operators = operators = grouped.operators
        self.of_gradients = operators.joint.made_of_tangents()
        self.exponentiated, self.compared = _exponentiated(operators), _compared(operators)
        self.subtracted = _subtracted(operators, self.of_gradients)
        self.in_loss = leading_to_loss(operators.joint)
        self.shared = shared_with_loss(operators, self.in_loss)
        self.operands: dict[Node, list[HighReason]] = defaultdict(list)
        for op in reversed(operators.all):
            if (entry := _entry(OPERANDS, op)) is not None:
                for n in op.inputs:
                    if _is_meant(entry, n):
                        self.operands[operators.base(n)].append(_named(entry, op))

    def of(self, node: Node, tensor: CountedTensor) -> Iterator[HighReason]:
        """Yield the reasons for one tensor."""
        if node in self.compared:
            yield COMPARED
        if tensor.kind != "param" and _is_statistic(node, tensor):
            yield STATISTIC
        yield from _unknown_readers(self.operators, node, self.of_gradients)
        if node in self.exponentiated:
            yield EXPONENTIATED
        if node in self.subtracted:
            yield _whole_input(SUBTRACTED, node)
        if node in self.shared:
            yield _whole_input(SHARED, node)
        yield from self.operands.get(node, ())
        op = self.operators.of_node.get(node)
        if op is not None and node in op.outputs and (entry := _entry(RESULTS, op)) is not None:
            yield _named(entry, op)
        if node in self.in_loss:
            yield LOSS


def _entry(table: Mapping[str, HighReason], op: Operator) -> HighReason | None:
    """Return the table's entry for an operator's overload, or for all its overloads, or None."""
    found = (table.get(name) for name in _names(op))
    return next((entry for entry in found if entry is not None), None)


def _names(op: Operator) -> tuple[str, str]:
    """Return the names of an operator's overload and of the operator: ``aten.clamp.Tensor``, ``aten.clamp``."""
    return str(op.nodes[0].meta.get("original_aten", op.nodes[0].target)), op.aten


def _is_meant(entry: HighReason, operand: Node) -> bool:
    val = value(operand)
    return entry.last_size is None or (val is not None and val.ndim > 0 and val.shape[-1] == entry.last_size)


def _whole_input(reason: HighReason, node: Node) -> HighReason:
    """Return the reason, for an input in the input's own dtype: the input itself is there in backward for nothing."""
    return replace(reason, as_it_is=True) if node.op == "placeholder" else reason


def _named(reason: HighReason, op: Operator) -> HighReason:
    return replace(reason, why=f"{reason.why} ({op.aten})")


def _exponentiated(operators: Operators) -> frozenset[Node]:
    """Return the values that attention's backward exponentiates, and the sources of backward's other exponentials."""
    found: set[Node] = set()
    for op in operators.all:
        for position in EXPONENTIATED_OPERANDS.get(op.nodes[0].target, ()):
            arg = argument(op.nodes[0], position)
            if isinstance(arg, Node):
                found.add(operators.base(arg))
    for node in operators.joint.backward_nodes():
        if node.target is ops.aten.exp.default:
            found |= {operators.base(n) for n in _forward_sources(node.args)}
    return frozenset(found)


def _compared(operators: Operators) -> frozenset[Node]:
    """Return the values that backward compares for equality, as a maximum's backward does to find the position."""
    found: set[Node] = set()
    for node in operators.joint.backward_nodes():
        if node.target is ops.aten.eq.Tensor:
            found |= {operators.base(n) for n in _forward_sources(node.args)}
    return frozenset(found)


def _subtracted(operators: Operators, of_gradients: Container[Node]) -> frozenset[Node]:
    """Return the values of which backward subtracts one from another. A mean, which is broadcast, is none of them."""
    found: set[Node] = set()
    for node in operators.joint.backward_nodes():
        operands = [n for n in node.args if isinstance(n, Node)]
        if node.target in ops.DIFFERENCES and len(operands) == 2 and node not in of_gradients:
            sources = [_forward_sources([n]) for n in operands]
            if all(sources) and all(_size(n) == _size(node) for n in operands):
                found |= {operators.base(n) for both in sources for n in both}
    return frozenset(found)


def _forward_sources(args: Iterable[object]) -> set[Node]:
    """Return the forward values that backward adds or multiplies to compute ``args``."""
    seen: set[Node] = set()
    stack = list(args)
    while stack:
        node = stack.pop()
        if isinstance(node, Node) and node not in seen:
            seen.add(node)
            if is_backward(node) and node.target in _COMBINING and not _is_product_of_values(node):
                stack += node.args
    return {node for node in seen if not is_backward(node)}


_COMBINING = having(Trait.COMBINES)


def _is_product_of_values(node: Node) -> bool:
    """Return whether a node multiplies or divides tensors: GELU's exp(-x^2 / 2) decays before x^2's error counts."""
    return node.target in ops.PRODUCTS and len(node.args) == 2 and all(isinstance(arg, Node) for arg in node.args)


def _is_statistic(node: Node, tensor: CountedTensor) -> bool:
    """Return whether every reader broadcasts the value to a larger tensor, so that its error is in every element."""
    if tensor.feeds_gemm or tensor.of_gemm:
        return False
    own = numel_hint(tensor_of(node))
    found = [user for _, user in readers(node) if user.op == "call_function" and not is_backward(user)]
    return bool(found) and all(has_tag(user, torch.Tag.pointwise) and _size(user) > own for user in found)


def _size(node: Node) -> int:
    """Return the elements of a node's result; 0 for several results, as of ``frexp``."""
    val = value(node)
    return 0 if val is None else numel_hint(val)


def _unknown_readers(operators: Operators, node: Node, of_gradients: Container[Node]) -> Iterator[HighReason]:
    """Yield the reason to keep the dtype of a value for each reading operator that no table has.

    A backward node that belongs to no operator comes from a user's own backward. It is known if it is a sum of
    products. If no gradient is among its terms, its own readers count as well: ``sin(30 * x)`` reads ``x``.
    """
    seen, stack = {node}, [node]
    while stack:
        for _, reader in readers(stack.pop()):
            op = operators.of_backward_node.get(reader)
            if op is not None and not _is_known(op):
                yield replace(_named(UNKNOWN, op), unknown=named(op.aten, op.name, op.module, op.source))
            elif op is None and is_backward(reader) and reader.target not in _SUMS_OF_PRODUCTS:
                yield replace(UNKNOWN, why=f"{UNKNOWN.why} ({reader.target})", unknown=str(reader.target))
            elif op is None and is_backward(reader) and reader not in of_gradients and reader not in seen:
                seen.add(reader)
                stack.append(reader)


_SUMS_OF_PRODUCTS = ops.TERMS.keys() | ops.GEMMS_BACKWARD


def _is_known(op: Operator) -> bool:
    return op.is_gemm or not (HARMLESS | RESULTS.keys() | OPERANDS.keys()).isdisjoint(_names(op))
