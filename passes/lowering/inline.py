"""Make casts part of Inductor's loops on a CPU: encode where the value is computed, decode where it is read.

Most casts store only what backward reads. Such a cast has no other reader and needs no kernel of its own. Its losses
are counted from the codes, which are results of the forward half (`fxprec.numerics.stats`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from fxprec.ir.symbolic import Dequantize, Quantize
from fxprec.passes.analysis.joint import results_of, tensor_of
from fxprec.passes.analysis.replay.casts import VECTORIZED
from fxprec.passes.lowering.lowered import CodedResult
from fxprec.passes.lowering.rows import WatchedRows


@dataclass(frozen=True)
class Inlined:
    """The casts that need no kernel."""

    nodes: Collection[Node] = frozenset()
    counted: tuple[CodedResult, ...] = field(default=())

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the watched rows that are counted from codes."""
        return tuple(result.row for result in self.counted)


def inlined_casts(graph: Graph, watched: Collection[int], rows: WatchedRows) -> Inlined:
    """Return the casts to inline; the codes of a watched cast must be results of the graph, to be counted."""
    if not rows.inlines:
        return Inlined()
    inputs = graph.find_nodes(op="placeholder")
    positions = {node: i for i, node in enumerate(results_of(graph))}
    nodes, counted = set[Node](), dict[int, CodedResult]()
    for q, cast in Quantize.among(Quantize.nodes(graph)):
        if cast.row in (rows.scaled - rows.copied) | rows.measured or tensor_of(q).dtype not in VECTORIZED:
            continue
        if cast.row in watched and cast.row not in counted:
            if q not in positions:
                continue
            counted[cast.row] = CodedResult(positions[q], cast.row, cast.format, inputs.index(cast.table))
        nodes.add(q)
    for x, read in Dequantize.among(Dequantize.nodes(graph)):
        if (
            read.row not in rows.scaled - rows.copied
            and tensor_of(read.q).dtype in VECTORIZED
            and _is_stored_elsewhere(read.q, nodes)
        ):
            nodes.add(x)
    return Inlined(nodes, tuple(counted.values()))


def _is_stored_elsewhere(q: Node, nodes: Collection[Node]) -> bool:
    """Return whether no kernel makes ``q`` in this graph: a kernel would return the values with the codes."""
    return q.target is not Quantize.target or q in nodes
