"""Keep apart from 0 what backward asks for its sign.

A ReLU's gradient is masked by whether its result is above 0, and in e4m3fn all below 2^-10 is 0: of activations of rms
0.1 nearly 1 % would lose their gradient. They are stored as the smallest number instead, an error that no sum notices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, Node

from fxprec.ir.operators import Trait, having
from fxprec.ir.symbolic import Dequantize, Quantize
from fxprec.numerics.formats import parse
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import argument, is_backward, readers
from fxprec.passes.base import Work
from fxprec.passes.casts.sites import emit

_ASKS_ABOVE = having(Trait.ASKS_ABOVE)
_ASKS_BELOW = having(Trait.ASKS_BELOW)


@dataclass(frozen=True)
class KeepSigns:
    """Have casts round what is not 0 to what is not 0, where backward compares the copy with 0."""

    name: str = "keep-signs"

    def apply(self, work: Work) -> None:
        for q, cast in Quantize.among(Quantize.nodes(work.joint.graph)):
            reads_copy = work.book.sites[cast.row].reads == "backward"
            if reads_copy and not is_backward(q) and not parse(cast.format).has_float32_range:
                _keep_signs(work.joint.graph, q, cast)


def asks_sign(read: Node) -> bool:
    """Say whether backward compares a copy with 0."""
    return not _asking(read).isdisjoint(_ASKS_ABOVE | _ASKS_BELOW)


def asks_above(reader: Node) -> bool:
    """Say whether a node asks whether, or where not, a value is above 0."""
    return reader.target in _ASKS_ABOVE and argument(reader, 1) == 0


def _asking(read: Node) -> set[object]:
    return {reader.target for _, reader in readers(read, through=ops.CASTS) if argument(reader, 1) == 0}


def _keep_signs(graph: Graph, q: Node, cast: Quantize) -> None:
    asking = {target for read, _ in Dequantize.among(q.users) for target in _asking(read)}
    nearest, x = parse(cast.format).smallest_subnormal, cast.x
    with graph.inserting_before(q):
        if asking & _ASKS_ABOVE:
            x = _away_from_zero(graph, x, ops.aten.gt.Scalar, ops.aten.clamp_min.default, nearest)
        if asking & _ASKS_BELOW:
            x = _away_from_zero(graph, x, ops.aten.lt.Scalar, ops.aten.clamp_max.default, -nearest)
    q.args = replace(cast, x=x).args


def _away_from_zero(
    graph: Graph, x: Node, is_beyond_zero: Callable[..., Any], clamp: Callable[..., Any], nearest: float
) -> Node:
    beyond = emit(graph, is_beyond_zero, (x, 0), x)
    return emit(graph, ops.aten.where.self, (beyond, emit(graph, clamp, (x, nearest), x), x), x, val=x.meta["val"])
