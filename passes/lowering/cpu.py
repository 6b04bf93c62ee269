"""Lowering for the CPU: symbolic ops become calls of three compiled kernels.

Expanding them for Inductor's C++ backend was tried first: on AVX2 ResNet-18 (width 32, batch 16, packed) compiled
2.6x and ran 1.5x slower than float32, since every statistic becomes a loop of its own and every cast 20 nodes. One
call that rounds, packs and counts in one pass over memory adds no nodes and little traffic.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.ir import symbolic
from fxprec.passes.lowering.layout import prefer_channels_last
from fxprec.passes.lowering.reuse import is_ours_alone

_CONVERT = torch.ops.prims.convert_element_type.default


def call_kernels(gm: GraphModule, watched: Collection[int]) -> tuple[tuple[int, ...], list[Node]]:
    """Replace symbolic ops; return the watched rows met and the nodes of their statistics, in one order."""
    graph = gm.graph
    prefer_channels_last(graph)
    stats: dict[int, Node] = {}
    for q in graph.find_nodes(op="call_function", target=symbolic.QUANTIZE):
        row = q.args[2]
        node = _store(graph, q)
        if row in watched:
            stats.setdefault(row, node)
    for x in graph.find_nodes(op="call_function", target=symbolic.DEQUANTIZE):
        _load(graph, x)
    return tuple(stats), list(stats.values())


def _store(graph: Graph, q: Node) -> Node:
    """Replace ``q`` and the dequantizes that read it as stored; return the node of the statistics."""
    readers = [u for u in q.users if u.target is symbolic.DEQUANTIZE and u.args[2] == symbolic.AS_STORED]
    guards = _guards(q, readers)
    keep = bool(guards)
    for guard in guards:
        guard.replace_all_uses_with(guard.args[0])  # type: ignore[arg-type]
        graph.erase_node(guard)
    keeps_codes = len(readers) < len(q.users) and q.args[4] != "simulate"
    x = q.args[0]
    assert isinstance(x, Node)
    overwrites = bool(readers) and is_ours_alone(x)
    values: Node = x
    codes: Node = x
    with graph.inserting_before(q):
        if overwrites and keeps_codes:
            call = graph.call_function(symbolic.STORE_, (*q.args, keep))
            codes, stats = (graph.call_function(operator.getitem, (call, i)) for i in range(2))
        elif overwrites:
            stats = graph.call_function(symbolic.ROUND_, (*q.args, keep))
        elif keeps_codes:
            call = graph.call_function(symbolic.STORE, (*q.args, bool(readers), keep))
            codes, values, stats = (graph.call_function(operator.getitem, (call, i)) for i in range(3))
        else:
            call = graph.call_function(symbolic.ROUND, (*q.args, keep))
            values, stats = (graph.call_function(operator.getitem, (call, i)) for i in range(2))
            codes = values
    for reader in readers:
        _replace(graph, reader, values)
    codes.meta.setdefault("val", q.meta["val"])
    q.replace_all_uses_with(codes)
    graph.erase_node(q)
    return stats


def _guards(q: Node, readers: Sequence[Node]) -> list[Node]:
    """Return the ``keep_nonfinite`` nodes of ``q``'s readers, if these have no other users: the kernel does it."""
    guards = [u for r in readers for u in r.users]
    alone = all(g.target is symbolic.KEEP_NONFINITE and g.args[1] is q.args[0] for g in guards)
    return guards if alone else []


def _load(graph: Graph, x: Node) -> None:
    q, table, row, fmt, storage, _ = x.args
    assert storage != "simulate"
    with graph.inserting_before(x):
        values = graph.call_function(symbolic.LOAD, (q, table, row, fmt))
    _replace(graph, x, values)


def _replace(graph: Graph, x: Node, values: Node) -> None:
    """Put float32 ``values`` in the place of dequantize ``x``, which may want another dtype."""
    dtype = x.args[5]
    with graph.inserting_before(x):
        new = values if dtype == torch.float32 else graph.call_function(_CONVERT, (values, dtype))
    new.meta.setdefault("val", x.meta["val"])  # what scales it is expanded after this
    x.replace_all_uses_with(new)
    graph.erase_node(x)
