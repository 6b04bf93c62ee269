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
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxprec.passes.analysis import linear, ops
from fxprec.passes.analysis.groups import Grouped
from fxprec.passes.analysis.joint import argument, has_tag, is_backward, numel_hint, readers, tensor_of, value
from fxprec.passes.analysis.operators import Operator, Operators
from fxprec.passes.analysis.tensors import CountedTensor


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that stays above 8 bits when it is saved."""

    why: str
    as_it_is: bool = False
    """Whether it keeps its own dtype, and not the recipe's high format."""
    last_size: int | None = None
    """Which operands are meant: those whose last dimension has this size."""
    unknown: str = ""
    """The operator in no table whose backward reads the tensor, and its module."""


_PROBABILITY = "a probability below 2^-10 would be 0 in e4m3fn, and over 1,000 keys most are"
_ANGLE = "an angle's error counts in radians, and from 16 to 32 e4m3fn rounds by up to 1"
_POSITION = "a position: near the border e4m3fn rounds it by 1/32 of half the image, bf16 by 1/512, which may be pixels"
_GROWS = "its gradient grows as e^x: an error of 0.5 in x is a factor of 1.6"
_NEAR_1 = "its gradient divides by the root of 1 - x^2, which is 0 where x is rounded to 1"

# Results that the backward of the operator that made them reads, by operator, with the reason.
RESULTS: Mapping[str, str] = {
    "aten._softmax": _PROBABILITY,
    "aten._safe_softmax": _PROBABILITY,
    "aten.tanh": "its gradient is 1 - y^2: near 1 an error of 2^-5 in y is all of it",
    "aten.sigmoid": "its gradient is y (1 - y): near 1 an error of 2^-5 in y is all of it",
    "aten.logcumsumexp": "backward exponentiates it, in a sum: an error of 0.5 in the exponent is a factor of 1.6",
    "aten.expm1": "its gradient is y + 1: near -1 an error of 2^-5 in y is all of it",
    "aten.cumprod": "backward divides it by a factor: after a small factor it is 0 in e4m3fn, and the gradient with it",
    "aten.rsqrt": "its gradient is y^3 / 2: of an operand below 5e-6 y is beyond e4m3fn's 448",
    "aten.reciprocal": "its gradient is y^2: of an operand below 1/448 y is beyond e4m3fn's 448",
    "aten.exp": "its range is as wide as the exponent's: it overflows, or most of it is 0",
}

# Operands that the backward of an operator reads, by operator, with the reason.
OPERANDS: Mapping[str, Kept] = {
    "aten.sin": Kept(_ANGLE),
    "aten.cos": Kept(_ANGLE),
    "aten.asin": Kept(_NEAR_1, as_it_is=True),
    "aten.acos": Kept(_NEAR_1, as_it_is=True),
    "aten.atanh": Kept("its gradient divides by 1 - x^2, which is 0 where x is rounded to 1", as_it_is=True),
    "aten.erfinv": Kept("its gradient is infinite where x is rounded to 1", as_it_is=True),
    "aten.grid_sampler_2d": Kept(_POSITION, as_it_is=True, last_size=2),
    "aten.grid_sampler_3d": Kept(_POSITION, as_it_is=True, last_size=3),
    "aten.sinh": Kept(_GROWS),
    "aten.cosh": Kept(_GROWS),
}

# Operators whose backward bears 8 bits in what it reads: it is linear in that value (products, norms, sums) or bounded
# by it (activations). So do GEMMs. What the backward of any other operator reads keeps its own dtype.
_HARMLESS = (
    "add sub rsub mul div neg abs sign square pow.Tensor_Scalar addcmul addcdiv lerp where clamp clamp_min clamp_max"
    " maximum minimum sum mean cumsum var var_mean std std_mean linalg_vector_norm norm masked_fill constant_pad_nd"
    " embedding index index_select index_put gather scatter scatter_add cat stack repeat dropout native_dropout"
    " relu relu6 threshold leaky_relu rrelu_with_noise prelu _prelu_kernel hardtanh hardsigmoid hardswish"
    " gelu silu mish tan elu celu selu softplus log_sigmoid log_sigmoid_forward glu erf erfc atan asinh"
    " native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit rms_norm _fused_rms_norm"
    " _native_batch_norm_legit_functional cudnn_batch_norm"
    " avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d max_pool2d_with_indices"
    " max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d upsample_nearest2d upsample_bilinear2d"
    " replication_pad1d replication_pad2d replication_pad3d linalg_cross _trilinear"
    " mse_loss smooth_l1_loss huber_loss l1_loss nll_loss_forward nll_loss2d_forward binary_cross_entropy_with_logits"
    " _grouped_mm"
)
HARMLESS = frozenset(f"aten.{name}" for name in _HARMLESS.split()) | {"transformers.grouped_mm_fallback"}

# Attention makes its probabilities again in backward, exp(q k - logsumexp): an error of q or k is exponentiated, and
# rows no longer add up to 1.
EXPONENTIATED_OPERANDS: Mapping[object, tuple[int, ...]] = dict.fromkeys(ops.ATTENTION, (0, 1))
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
            found[tensor.id] = _named(Kept(RESULTS[op.aten]), op)
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


_COMBINING = (
    ops.VIEWS
    | ops.CASTS
    | ops.existing(ops.aten, "add.Tensor sub.Tensor mul.Tensor neg div.Tensor add.Scalar sub.Scalar mul.Scalar abs")
)


_PRODUCTS = ops.existing(ops.aten, "mul.Tensor div.Tensor")


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
        elif op is None and is_backward(reader) and reader.target not in linear.TERMS.keys() | ops.GEMMS_BACKWARD:
            yield replace(UNKNOWN, why=f"{UNKNOWN.why} ({reader.target})", unknown=str(reader.target))


def _is_known(op: Operator) -> bool:
    names = {op.aten, str(op.nodes[0].meta.get("original_aten", op.nodes[0].target))}
    return op.is_gemm or not names.isdisjoint(HARMLESS | RESULTS.keys() | OPERANDS.keys())
