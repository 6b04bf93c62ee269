"""Which saved values 8 bits would spoil, and why: rounded, they do more harm in backward than they save memory.

Backward reads a saved value through one formula. Where the formula is linear in it, an error of 6 % (e4m3fn) is an
error of 6 % in a summand, and errors of many summands cancel. Where it is not, the error is multiplied or does not
cancel: such a value keeps the recipe's high format, and a statistic, one number that many elements are multiplied by,
its own dtype. What the model or its backward divides by, and log-softmax's result, which backward exponentiates, no
pass touches at all (`values`).

The bounds are tested one by one (tests/passes/test_sensitive.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from fxprec.ir.operators import Kept, Trait, column, having
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.groups import Grouped
from fxprec.passes.analysis.joint import argument, has_tag, is_backward, numel_hint, readers, tensor_of, value
from fxprec.passes.analysis.operators import Operator, Operators
from fxprec.passes.analysis.tensors import CountedTensor

# Why results, and operands, that an operator's backward reads stay above 8 bits, by the operator's name.
RESULTS: Mapping[str, Kept] = {str(operator): kept for operator, kept in column("result").items()}
OPERANDS: Mapping[str, Kept] = {str(operator): kept for operator, kept in column("operands").items()}
# Operators whose backward bears 8 bits in what it reads. So do GEMMs. What the backward of any other operator reads
# keeps its own dtype.
HARMLESS = frozenset(map(str, having(Trait.BEARS_ROUNDING))) | {"transformers.grouped_mm_fallback"}

EXPONENTIATED_OPERANDS: Mapping[object, tuple[int, ...]] = column("exponentiates")
EXPONENTIATED = Kept("backward exponentiates it: an error of 0.5 in the exponent is a factor of 1.6")
STATISTIC = Kept(
    "it is a statistic: its one error is in every element it is spread over, and it takes next to nothing",
    as_it_is=True,
)
UNKNOWN = Kept("no table says how the backward that reads it bears rounding", as_it_is=True)
COMPARED = Kept(
    "backward asks where it equals another value: a rounded one equals it nowhere, and 0 / 0 is NaN", as_it_is=True
)


def kept(grouped: Grouped) -> dict[int, Kept]:
    """Return which counted forward tensors stay above 8 bits when they are saved, by id."""
    operators = grouped.operators
    exponentiated, compared = _exponentiated(operators), _compared(operators)
    operands = {
        operators.base(n): _named(OPERANDS[op.aten], op)
        for op in operators.all
        if op.aten in OPERANDS
        for n in op.inputs
        if _is_meant(OPERANDS[op.aten], n)
    }
    found: dict[int, Kept] = {}
    for node, tensor in grouped.values.items():
        if node in compared:
            found[tensor.id] = COMPARED
        elif tensor.kind != "param" and _is_statistic(node, tensor):
            found[tensor.id] = STATISTIC
        elif (unknown := next(_unknown_readers(operators, node), None)) is not None:
            found[tensor.id] = unknown
        elif node in exponentiated:
            found[tensor.id] = EXPONENTIATED
        elif node in operands:
            found[tensor.id] = operands[node]
        elif (op := operators.of_node.get(node)) is not None and op.aten in RESULTS and node in op.outputs:
            found[tensor.id] = _named(RESULTS[op.aten], op)
    return found


def _is_meant(entry: Kept, operand: Node) -> bool:
    val = value(operand)
    return entry.last_size is None or (val is not None and val.ndim > 0 and val.shape[-1] == entry.last_size)


def _named(reason: Kept, op: Operator) -> Kept:
    return replace(reason, why=f"{reason.why} ({op.aten})")


def _exponentiated(operators: Operators) -> frozenset[Node]:
    """Return what attention's backward exponentiates, and what the arguments of other exponentials there come from."""
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
    """Return what backward compares for equality, as that of a maximum does to find where it stood."""
    found: set[Node] = set()
    for node in operators.joint.backward_nodes():
        op = operators.of_backward_node.get(node)
        if node.target is ops.aten.eq.Tensor and (op is None or op.aten not in _HALVED_AT_TIES):
            found |= {operators.base(n) for n in _forward_sources(node.args)}
    return frozenset(found)


# Of two operands: backward compares them with each other, and halves the gradient where they are equal.
_HALVED_AT_TIES = ("aten.maximum", "aten.minimum")


def _forward_sources(args: Iterable[object]) -> set[Node]:
    """Return the forward values that arguments in backward are sums or products of."""
    found: set[Node] = set()
    stack = list(args)
    while stack:
        node = stack.pop()
        if not isinstance(node, Node):
            continue
        if not is_backward(node):
            found.add(node)
        elif node.target in _COMBINING and not _is_product_of_values(node):
            stack += node.args
    return found


_COMBINING = having(Trait.COMBINES)
_PRODUCTS = frozenset({ops.aten.mul.Tensor, ops.aten.div.Tensor})


def _is_product_of_values(node: Node) -> bool:
    """Of a square, as in GELU's exp(-x^2 / 2), the exponential decays before its error counts."""
    return node.target in _PRODUCTS and all(isinstance(arg, Node) for arg in node.args)


def _is_statistic(node: Node, tensor: CountedTensor) -> bool:
    """Say whether every reader spreads the value over a larger tensor: its one error is then in all of them."""
    if tensor.feeds_gemm or tensor.of_gemm:
        return False
    own = numel_hint(tensor_of(node))
    found = [user for _, user in readers(node) if user.op == "call_function" and not is_backward(user)]
    return bool(found) and all(
        has_tag(user, torch.Tag.pointwise) and numel_hint(tensor_of(user)) > own for user in found
    )


def _unknown_readers(operators: Operators, value: Node) -> Iterator[Kept]:
    """Yield why ``value`` keeps its dtype for each operator in no table whose backward reads the value.

    A node of backward that no operator owns is a user's own backward: known where it is a sum of products.
    """
    for _, reader in readers(value):
        op = operators.of_backward_node.get(reader)
        if op is not None and not _is_known(op):
            yield replace(_named(UNKNOWN, op), unknown=f"{op.aten} ({op.module})" if op.module else op.aten)
        elif op is None and is_backward(reader) and reader.target not in ops.TERMS.keys() | ops.GEMMS_BACKWARD:
            yield replace(UNKNOWN, why=f"{UNKNOWN.why} ({reader.target})", unknown=str(reader.target))


def _is_known(op: Operator) -> bool:
    names = {op.aten, str(op.nodes[0].meta.get("original_aten", op.nodes[0].target))}
    return op.is_gemm or not names.isdisjoint(HARMLESS | RESULTS.keys() | OPERANDS.keys())
