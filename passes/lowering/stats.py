"""Append statistics to the outputs of a partitioned graph: a row of numbers per watched cast."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.ir import symbolic


def watch(gm: GraphModule, watched: Collection[int]) -> tuple[tuple[int, ...], list[Node]]:
    """Add a ``site_stats`` node beside each watched ``quantize``; return their rows and nodes, in one order."""
    return _add_beside(gm.graph, symbolic.SITE_STATS, watched)


def count(gm: GraphModule, counted: Collection[int]) -> tuple[tuple[int, ...], list[Node]]:
    """Add a ``histogram`` node beside each counted ``quantize``; return their rows and nodes, in one order."""
    return _add_beside(gm.graph, symbolic.HISTOGRAM, counted)


def _add_beside(graph: Graph, target: object, rows: Collection[int]) -> tuple[tuple[int, ...], list[Node]]:
    nodes: dict[int, Node] = {}
    for q in graph.find_nodes(op="call_function", target=symbolic.QUANTIZE):
        x, table, row, fmt, _ = q.args
        if row in rows and row not in nodes:
            with graph.inserting_before(q):
                nodes[row] = graph.call_function(target, (x, table, row, fmt))  # type: ignore[arg-type]
    return tuple(nodes), list(nodes.values())


def append_gathered(graph: Graph, vectors: list[Node]) -> None:
    """Return ``vectors`` as one vector after the graph's own outputs."""
    with graph.inserting_before(graph.output_node()):
        append_outputs(graph, [graph.call_function(torch.ops.aten.cat.default, (vectors,))])


def append_outputs(graph: Graph, vectors: list[Node]) -> None:
    """Return ``vectors`` after the graph's own outputs."""
    output = graph.output_node()
    results = output.args[0]
    assert isinstance(results, list | tuple)
    output.args = (type(results)([*results, *vectors]),)
