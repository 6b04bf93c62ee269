"""Lower symbolic operators to calls of compiled CPU kernels, which count statistics while they round values.

Expanding these operators for Inductor's C++ backend was tried first. On AVX2 ResNet-18 (width 32, batch 16, packed)
took 2.6x as long to compile and ran 1.5x slower than float32: every statistic became a loop, and every cast 20 nodes.
One call that rounds, packs and counts in one pass over memory adds no nodes and little traffic. Casts whose statistics
are not counted here are operators of Inductor's loops (`inline`, `in_loops`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.ir.symbolic import Dequantize, KeepNonfinite, Quantize
from fxprec.kernels.casts import Load, Round, RoundOver, Store, StoreOver
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.lowering.layout import prefer_channels_last
from fxprec.passes.lowering.round_in_place import can_round_in_place
from fxprec.passes.sites import replace_node


def call_kernels(
    gm: GraphModule, watched: Collection[int], inlined: Collection[Node] = ()
) -> tuple[tuple[int, ...], list[Node]]:
    """Replace symbolic operators; return the watched rows found and the nodes of their statistics, in one order.

    ``inlined`` are casts to leave.
    """
    graph = gm.graph
    prefer_channels_last(graph, inlined)
    stats: dict[int, Node] = {}
    for q, cast in Quantize.among(n for n in Quantize.nodes(graph) if n not in inlined):
        node = _store(graph, q, cast)
        if cast.row in watched:
            stats.setdefault(cast.row, node)
    for x, read in Dequantize.among(n for n in Dequantize.nodes(graph) if n not in inlined):
        _load(graph, x, read)
    return tuple(stats), list(stats.values())


def _store(graph: Graph, q: Node, cast: Quantize) -> Node:
    """Replace ``q`` and the dequantizes that read it with its scale on; return the node of the statistics."""
    readers = [(x, read) for x, read in Dequantize.among(q.users) if read.is_as_stored]
    guards = _guards(cast, [x for x, _ in readers])
    keep = bool(guards)
    for guard, kept in guards:
        replace_node(guard, kept.rounded)
    keeps_codes = len(readers) < len(q.users) and not cast.is_simulated
    overwrites = bool(readers) and can_round_in_place(cast.x)
    values, codes = cast.x, cast.x
    with graph.inserting_before(q):
        if overwrites and keeps_codes:
            call = StoreOver.like(cast, keep=keep).insert(graph)
            codes, stats = (graph.call_function(operator.getitem, (call, i)) for i in range(2))
        elif overwrites:
            stats = RoundOver.like(cast, keep=keep).insert(graph)
        elif keeps_codes:
            call = Store.like(cast, value=bool(readers), keep=keep).insert(graph)
            codes, values, stats = (graph.call_function(operator.getitem, (call, i)) for i in range(3))
        else:
            call = Round.like(cast, keep=keep).insert(graph)
            values, stats = (graph.call_function(operator.getitem, (call, i)) for i in range(2))
            codes = values
    for x, read in readers:
        _replace(graph, x, read.dtype, values)
    codes.meta.setdefault("val", q.meta["val"])
    replace_node(q, codes)
    return stats


def _guards(cast: Quantize, readers: Sequence[Node]) -> list[tuple[Node, KeepNonfinite]]:
    """Return the ``keep_nonfinite`` nodes of a cast's readers if these have no other users; the kernel does it."""
    users = [u for r in readers for u in r.users]
    guards = list(KeepNonfinite.among(users))
    return guards if len(guards) == len(users) and all(kept.x is cast.x for _, kept in guards) else []


def _load(graph: Graph, x: Node, read: Dequantize) -> None:
    assert not read.is_simulated
    with graph.inserting_before(x):
        values = Load.like(read).insert(graph)
    _replace(graph, x, read.dtype, values)


def _replace(graph: Graph, x: Node, dtype: torch.dtype, values: Node) -> None:
    """Replace dequantize ``x`` by float32 ``values``, converted to the dtype of ``x``."""
    with graph.inserting_before(x):
        new = values if dtype == torch.float32 else graph.call_function(CONVERT, (values, dtype))
    new.meta.setdefault("val", x.meta["val"])  # the operator that takes its scale off is expanded after this
    replace_node(x, new)
