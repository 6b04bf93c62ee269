"""Select the regions that are worth a kernel: those whose inputs and outputs are in memory anyway.

A tensor that one kernel passes to another is written and read again. Inductor would fuse a region with its neighbours:
gather, cat, reductions over other dimensions, or another region of a different shape. If the tensors between them are
more than a small share of the bytes that the region moves, Inductor keeps the region. This does not count a reader
that waits for a library call which itself waits for the region: that reader reads memory in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch.fx import Graph, Node

from fxprec.passes.analysis.joint import readers
from fxprec.passes.analysis.replay.kernels import Kind, kind_of, result_bytes
from fxprec.passes.lowering.triton.regions import Region, is_constant, outputs

_SHARE = 8
"""The extra bytes of split loops may be 1 / ``_SHARE`` of the bytes that a region moves."""
_JOINED = torch.ops.aten.cat.default


def without_split_loops(graph: Graph, regions: Sequence[Region]) -> list[Region]:
    """Return the regions that split no loop. Repeat the test, since a region left to Inductor changes its result."""
    taken, calls = list(regions), _LibraryCalls(graph)
    while True:
        members = {node for region in taken for node in region.members}
        kept = [region for region in taken if not _splits_loops(region, members, calls)]
        if len(kept) == len(taken):
            return kept
        taken = kept


class _LibraryCalls:
    """For each node, the nodes that it waits for through a library call."""

    def __init__(self, graph: Graph) -> None:
        self.at = {node: 1 << i for i, node in enumerate(graph.nodes)}
        self.before: dict[Node, int] = {}
        self.before_calls: dict[Node, int] = {}
        """For each node, a bit mask of the nodes that earlier library calls wait for."""
        for node in graph.nodes:
            before = before_calls = 0
            for source in node.all_input_nodes:
                before |= self.before[source] | self.at[source]
                before_calls |= self.before_calls[source]
                if source.op == "call_function" and kind_of(source) is Kind.EXTERN:
                    before_calls |= self.before[source]
            self.before[node], self.before_calls[node] = before, before_calls

    def is_after_call(self, reader: Node, region: Region) -> bool:
        """Return whether ``reader`` waits for a call that waits for the region."""
        return any(self.before_calls[reader] & self.at[node] for node in region.members)


def _splits_loops(region: Region, members: Collection[Node], calls: _LibraryCalls) -> bool:
    read, written = _inputs(region), outputs(region)
    moved = sum(map(result_bytes, (*read, *written)))
    extra = sum(2 * result_bytes(x) for x in read if _is_fused(x, members))
    extra += sum(_extra_bytes(x, region, calls) for x in written)
    return extra * _SHARE > moved


def _inputs(region: Region) -> list[Node]:
    inside = region.members
    found = dict.fromkeys(source for node in region.nodes for source in node.all_input_nodes if source not in inside)
    return [source for source in found if not is_constant(source)]


def _is_fused(x: Node, members: Collection[Node]) -> bool:
    """Return whether only Inductor's loops need a value, so that nothing else requires it in memory."""
    while x not in members and kind_of(x) is Kind.VIEW and x.all_input_nodes:
        x = x.all_input_nodes[0]
    if x in members or not _is_loop(x):
        return False
    return not any(_needs_memory(reader) for reader in _readers(x))


def _extra_bytes(x: Node, region: Region, calls: _LibraryCalls) -> int:
    """Return the extra bytes of writing ``x`` and reading it again."""
    outside = [reader for reader in _readers(x) if reader not in region.members]
    if not any(_is_loop(reader) and not calls.is_after_call(reader, region) for reader in outside):
        return 0
    is_written = any(_needs_memory(reader) or calls.is_after_call(reader, region) for reader in outside)
    return result_bytes(x) * (1 if is_written else 2)


def _readers(x: Node) -> Iterator[Node]:
    return (reader for _, reader in readers(x, lambda user: kind_of(user) is Kind.VIEW))


def _is_loop(node: Node) -> bool:
    """Return whether a node is arithmetic, which Inductor fuses into the loops around it."""
    return node.op == "call_function" and (kind_of(node) in (Kind.FUSED, Kind.REDUCED) or node.target is _JOINED)


def _needs_memory(node: Node) -> bool:
    return node.op == "output" or not _is_loop(node)
