"""Keep a stored copy on the same side of a bound as its value, where backward compares the copy with the bound.

A ReLU's backward masks the gradient where the result is 0, and e4m3fn rounds everything below 2^-10 to 0. So nearly 1 %
of activations of rms 0.1 would lose their gradient. Such values are stored as the smallest number of the copy's scale
instead; the error is too small to change a sum. The same holds for the operand of `abs`, whose gradient has the
operand's sign.

Bounds other than 0 are kept in the same way. A ReLU6 has no gradient from 6 on, and e4m3fn rounds 5.75 to 6, so 5.75 is
stored as 5.5. bfloat16 rounds 5.99 to 6. The numbers beside a bound are the same at each power-of-two scale, as long as
the scaled bound is a normal number. A copy with a smaller bound has no scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, Node

from fxprec.ir.symbolic import Dequantize, Quantize, Rescale, is_in_blocks
from fxprec.numerics.formats import Format, parse
from fxprec.passes.analysis import ops, signs
from fxprec.passes.analysis.code_readers import code_readers
from fxprec.passes.analysis.joint import is_backward, tensor_of
from fxprec.passes.analysis.signs import TESTS_ABOVE, TESTS_BELOW
from fxprec.passes.base import Pass, Work
from fxprec.passes.sites import emit, emit_call
from fxprec.plan.scales import DOWN_EXP, ScaleGraph, Slot

_AT_LEAST, _AT_MOST = ops.aten.clamp_min.default, ops.aten.clamp_max.default


@dataclass(frozen=True)
class KeepSigns(Pass):
    """Keep stored copies on their value's side of each bound that backward compares them with."""

    name: str = "keep-signs"

    def apply(self, work: Work) -> None:
        for q, cast in Quantize.among(Quantize.nodes(work.joint.graph)):
            if is_in_blocks(q) or is_backward(q) or work.book.sites[cast.row].reads != "backward":
                continue
            rounds_to_0 = not parse(cast.format).has_float32_range
            bounds = {known for read in _decodes(q) for known in signs.bounds(read) if known[1] or rounds_to_0}
            if any(bound for _, bound in bounds):
                cast = _keep_signs(work.joint.graph, q, cast, bounds)
                if any(bound and not _is_normal_at_all_scales(parse(cast.format), bound) for _, bound in bounds):
                    work.unscaled.add(cast.row)
            if any(not bound for _, bound in bounds):
                _keep_sign_of_scale(work, q, cast, {target for target, bound in bounds if not bound})


def _is_normal_at_all_scales(fmt: Format, bound: float) -> bool:
    return math.ldexp(abs(bound), -DOWN_EXP) >= fmt.smallest_normal


def _decodes(q: Node) -> list[Node]:
    """Return the nodes that decode a copy, also after a move to host memory and back."""
    found = code_readers(q)
    return [node for node in (q.users if found is None else found) if Dequantize.match(node) is not None]


def _keep_sign_of_scale(work: Work, q: Node, cast: Quantize, comparisons: Set[object]) -> None:
    """Clamp non-zero inputs of a scaled copy to at least the smallest number of its scale, above 0 or below."""
    graph, x, scales = work.joint.graph, cast.x, work.scales or ScaleGraph()
    row, smallest = scales.num_rows(len(work.book.sites)), parse(cast.format).smallest_subnormal
    work.scales = replace(scales, slots=(*scales.slots, Slot(row, None, None, minus_copy=cast.row)))
    with graph.inserting_before(q):
        for tests, beyond, less, least in (
            (TESTS_ABOVE, ops.aten.gt.Scalar, ops.aten.lt.Tensor, smallest),
            (TESTS_BELOW, ops.aten.lt.Scalar, ops.aten.gt.Tensor, -smallest),
        ):
            if not comparisons.isdisjoint(tests):
                nearest = _of_scale(graph, least, Rescale(x, cast.table, row))
                is_nearer = emit(graph, less, (x, nearest), x)
                kept = emit(graph, ops.aten.where.self, (is_nearer, nearest, x), x, val=x.meta["val"])
                x = emit(graph, ops.aten.where.self, (emit(graph, beyond, (x, 0), x), kept, x), x, val=x.meta["val"])
    q.args = replace(cast, x=x).args


def _of_scale(graph: Graph, number: float, like: Rescale) -> Node:
    """Return a number of the format at the scale of a row, as a 0-dim tensor."""
    val = tensor_of(like.g).new_empty(())
    options = {"dtype": val.dtype, "device": val.device}
    constant = emit(graph, ops.aten.full.default, ([], number), like.g, kwargs=options, val=val)
    return emit_call(graph, replace(like, g=constant), like.g, val=val)


def _keep_signs(graph: Graph, q: Node, cast: Quantize, bounds: Set[tuple[object, float]]) -> Quantize:
    """Keep the operand of a cast beyond all bounds but 0, and return the cast of what is kept."""
    fmt, x = parse(cast.format), cast.x
    with graph.inserting_before(q):
        for tests, is_beyond in ((TESTS_ABOVE, ops.aten.gt.Scalar), (TESTS_BELOW, ops.aten.lt.Scalar)):
            for bound in sorted({bound for target, bound in bounds if target in tests}):
                if 0 < abs(bound) < fmt.largest:
                    x = _kept_beyond(graph, x, is_beyond, bound, fmt)
    kept = replace(cast, x=x)
    q.args = kept.args
    return kept


def _kept_beyond(graph: Graph, x: Node, is_beyond: Callable[..., Any], bound: float, fmt: Format) -> Node:
    """Return ``x`` with values beyond ``bound`` moved at least to the format's next number beyond it.

    If the bound is a number of the format, rounding cannot carry any other value across it. Otherwise the other values
    are clamped to the format's next number on their side.
    """
    upwards = is_beyond is ops.aten.gt.Scalar
    beyond = emit(graph, is_beyond, (x, int(bound) if bound.is_integer() else bound), x)
    first, second = (_AT_LEAST, _AT_MOST) if upwards else (_AT_MOST, _AT_LEAST)
    inside = x if _is_number(fmt, bound) else emit(graph, second, (x, next_number(fmt, bound, not upwards)), x)
    outside = emit(graph, first, (x, next_number(fmt, bound, upwards)), x)
    return emit(graph, ops.aten.where.self, (beyond, outside, inside), x, val=x.meta["val"])


def next_number(fmt: Format, bound: float, upwards: bool) -> float:
    """Return the format's next number above ``bound``, or below it."""
    if bound < 0:
        return -next_number(fmt, -bound, not upwards)
    step = _step(fmt, bound)
    if upwards:
        return (math.floor(bound / step) + 1) * step
    if bound == step * 2**fmt.mantissa_bits and bound > fmt.smallest_normal:
        return bound - step / 2  # below a power of two the spacing is half as wide
    return (math.ceil(bound / step) - 1) * step


def _step(fmt: Format, bound: float) -> float:
    """Return the spacing of the format's numbers just above ``bound``."""
    exponent = math.frexp(bound)[1] - 1 if bound else fmt.min_exponent
    return float(2.0 ** (max(exponent, fmt.min_exponent) - fmt.mantissa_bits))


def _is_number(fmt: Format, bound: float) -> bool:
    return (bound / _step(fmt, abs(bound))).is_integer()
