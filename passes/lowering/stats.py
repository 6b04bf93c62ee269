"""Append counts to the outputs of a partitioned graph: a row per watched cast (`fxprec.numerics.stats`)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.ir.symbolic import Count, Histogram, Quantize
from fxprec.kernels.counts import Gathered
from fxprec.passes.analysis.joint import results_of, set_results


def watch(gm: GraphModule, watched: Collection[int]) -> tuple[tuple[int, ...], list[Node]]:
    """Add a ``counts`` node beside each watched ``quantize``; return their rows and nodes, in one order."""
    return _add_beside(gm.graph, Count, watched)


def count(gm: GraphModule, counted: Collection[int]) -> tuple[tuple[int, ...], list[Node]]:
    """Add a ``histogram`` node beside each counted ``quantize``; return their rows and nodes, in one order."""
    return _add_beside(gm.graph, Histogram, counted)


def _add_beside(
    graph: Graph, counter: type[Count | Histogram], rows: Collection[int]
) -> tuple[tuple[int, ...], list[Node]]:
    nodes: dict[int, Node] = {}
    for q, cast in Quantize.among(Quantize.nodes(graph)):
        if cast.row in rows and cast.row not in nodes:
            with graph.inserting_before(q):
                nodes[cast.row] = counter.like(cast).insert(graph)
    return tuple(nodes), list(nodes.values())


class Counters:
    """The counters in which kernels count for rows, in the order of the rows in the result."""

    def __init__(
        self, watched: Collection[int], measured: Collection[int] = (), histograms: Collection[Node] = ()
    ) -> None:
        self._watched, self._measured, self._histograms = watched, measured, histograms
        self._found: dict[tuple[int, ...], Node] = {}

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the rows that kernels count for, in the order of their counters."""
        return tuple(row for rows in self._found for row in rows)

    @property
    def left(self) -> list[int]:
        """Return the watched rows that no kernel counts for."""
        taken = set(self.rows)
        return [row for row in self._watched if row not in taken]

    def __contains__(self, node: Node) -> bool:
        """Say whether a node counts, though nothing reads it before the graph's outputs are complete."""
        return node in self._found.values() or node in self._histograms

    def wants(self, row: int) -> bool:
        """Say whether a row is watched and nothing counts for it so far."""
        return row in self._watched and row not in self.rows

    def wants_moments(self, row: int) -> bool:
        """Say whether the row's moments are wanted too."""
        return self.wants(row) and row in self._measured

    def add(self, row: int, counters: Node) -> None:
        """Note the counters in which a kernel counts for ``row``, if the row is wanted."""
        if self.wants(row):
            self._found[row,] = counters

    def add_first(self, rows: tuple[int, ...], counters: Node | None) -> None:
        """Note the counters in which generated kernels count for ``rows``; these come before all others."""
        if counters is not None:
            self._found = {rows: counters, **self._found}

    def gathered(self, graph: Graph) -> list[Node]:
        """Return the node of the rows of counts, all in one, if there are any."""
        if not self._found:
            return []
        nodes = list(self._found.values())
        with graph.inserting_before(graph.output_node()):
            both = nodes[0] if len(nodes) == 1 else graph.call_function(torch.ops.aten.cat.default, (nodes,))
            vals = [n.meta["val"] for n in nodes]
            both.meta.setdefault("val", vals[0].new_empty(sum(v.shape[0] for v in vals)))
            return [Gathered(both).insert(graph)]


def append_gathered(graph: Graph, vectors: list[Node]) -> None:
    """Return ``vectors`` as one vector after the graph's own outputs."""
    if not vectors:
        return
    with graph.inserting_before(graph.output_node()):
        append_outputs(graph, [graph.call_function(torch.ops.aten.cat.default, (vectors,))])


def append_outputs(graph: Graph, vectors: list[Node]) -> None:
    """Return ``vectors`` after the graph's own outputs."""
    set_results(graph, [*results_of(graph), *vectors])
