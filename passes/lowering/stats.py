"""Append statistics to the outputs of a partitioned graph: three numbers per watched site."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec import symbolic


def watch(gm: GraphModule, watched: Collection[int]) -> tuple[int, ...]:
    """Add a ``site_stats`` node beside each watched ``quantize`` and return their vector as a last output.

    Returns the site ids in the vector's order; ``()`` leaves the graph as it was.
    """
    graph = gm.graph
    nodes: dict[int, Node] = {}
    for q in graph.find_nodes(op="call_function", target=symbolic.QUANTIZE):
        x, table, site, fmt, _ = q.args
        if site in watched and site not in nodes:
            with graph.inserting_before(q):
                nodes[site] = graph.call_function(symbolic.SITE_STATS, (x, table, site, fmt))
    if not nodes:
        return ()
    append_gathered(graph, list(nodes.values()))
    return tuple(nodes)


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
