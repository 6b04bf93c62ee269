"""Append counts to the outputs of a partitioned graph: a row per watched cast (`fxprec.numerics.stats`)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.ir.symbolic import Count, Histogram, Quantize
from fxprec.kernels.counts import Gathered
from fxprec.passes.analysis.joint import results_of, set_results


def watch(gm: GraphModule, watched: Collection[int]) -> tuple[tuple[int, ...], list[Node]]:
    """Add a ``counts`` node beside each watched ``quantize``; return their rows and the nodes, in the same order."""
    return _add_beside(gm.graph, Count, watched)


def count(gm: GraphModule, counted: Collection[int]) -> tuple[tuple[int, ...], list[Node]]:
    """Add a ``histogram`` node beside each counted ``quantize``; return their rows and the nodes, in the same order."""
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
    """The counters that kernels write for rows, in the order of the rows in the result."""

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
        """Return whether a node counts; nothing reads it until the graph's outputs are complete."""
        return node in self._found.values() or node in self._histograms

    def wants(self, row: int) -> bool:
        """Return whether a row is watched and has no counters yet."""
        return row in self._watched and row not in self.rows

    def wants_moments(self, row: int) -> bool:
        """Return whether the row's moments are measured too."""
        return self.wants(row) and row in self._measured

    def add(self, row: int, counters: Node) -> None:
        """Note the counters that a kernel writes for ``row``, if the row is wanted."""
        if self.wants(row):
            self._found[row,] = counters

    def add_first(self, rows: tuple[int, ...], counters: Node | None) -> None:
        """Note the counters that generated kernels write for ``rows``; these come before all others."""
        if counters is not None:
            self._found = {rows: counters, **self._found}

    def gathered(self, graph: Graph) -> list[Node]:
        """Return one node with the counts of all rows, as a list; empty if there are none."""
        if not self._found:
            return []
        nodes = list(self._found.values())
        with graph.inserting_before(graph.output_node()):
            both = nodes[0] if len(nodes) == 1 else graph.call_function(torch.ops.aten.cat.default, (nodes,))
            vals = [n.meta["val"] for n in nodes]
            both.meta.setdefault("val", vals[0].new_empty(sum(v.shape[0] for v in vals)))
            return [Gathered(both).insert(graph)]


def append_gathered(graph: Graph, vectors: list[Node]) -> None:
    """Append ``vectors`` to the graph's outputs, concatenated into one."""
    if not vectors:
        return
    with graph.inserting_before(graph.output_node()):
        append_outputs(graph, [graph.call_function(torch.ops.aten.cat.default, (vectors,))])


def append_outputs(graph: Graph, vectors: list[Node]) -> None:
    """Append ``vectors`` to the graph's outputs."""
    set_results(graph, [*results_of(graph), *vectors])
