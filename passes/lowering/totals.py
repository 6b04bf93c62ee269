"""Count statistics on a GPU: the kernel that computes a value counts it row by row; one more kernel adds all rows up.

Inductor fuses a reduction along rows with the kernel that computes the values. It splits a reduction of all elements
into parts that do not fuse with that kernel, so the values would be written and read again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fxprec.ir.symbolic import Count, Quantize
from fxprec.kernels.counts import Totals
from fxprec.numerics import stats
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.lowering.expand import MOST_DIMS, counted_parts
from fxprec.passes.lowering.gemm_casts import call
from fxprec.passes.lowering.rows import WatchedRows

aten = torch.ops.aten
_PART = 256  # elements; 8 bytes of counts are then a small share
_LONGEST = 1 << 31  # elements; counts have 32 bits


@dataclass(frozen=True)
class _Site:
    position: int
    row: int
    elements: int
    measured: bool
    scaled: bool
    shape: tuple[int, ...]
    """Shape of each tensor of parts."""
    parts: tuple[tuple[Node, ...], ...]
    """Each number that `stats.count_parts` returns: of the parts of every piece of the tensor."""
    short: bool

    @property
    def counts(self) -> list[Node]:
        """The integers of all parts, in their order in `Totals`."""
        return [part for number in self.parts[: len(self.parts) - 3 * self.measured] for part in number]

    @property
    def moments(self) -> list[Node]:
        return [part for number in self.parts[len(self.parts) - 3 * self.measured :] for part in number]


def cast_where_read(graph: Graph) -> None:
    """Move casts of the graph's inputs to their first reader: Inductor does not fuse kernels far from each other."""
    for q, cast in Quantize.among(Quantize.nodes(graph)):
        if cast.x.op == "placeholder" and q.users:
            min(q.users).prepend(q)


def add_up(
    graph: Graph, counts: list[Node], rows: WatchedRows, pieces: Mapping[Node, Sequence[Node]]
) -> tuple[list[int], list[Node]]:
    """Replace the ``counts`` nodes of known sizes by ``totals``; some count in ``pieces``.

    Returns positions among ``counts``, in the order of the rows in the nodes that are returned beside them.
    """
    groups: dict[tuple[int, ...], list[_Site]] = {}
    for position, node in enumerate(counts):
        site = _counted(graph, position, node, rows, pieces.get(node, ()))
        if site is not None:
            groups.setdefault(site.shape[:-1], []).append(site)
    done = [site.position for sites in groups.values() for site in sites]
    left = [i for i in range(len(counts)) if i not in done]
    with graph.inserting_before(graph.output_node()):
        found = [_total(graph, sites, Count.of(counts[sites[0].position]).table) for sites in groups.values()]
    for i in done:
        graph.erase_node(counts[i])
    return [*done, *left], [*found, *(counts[i] for i in left)]


def _total(graph: Graph, sites: Sequence[_Site], table: Node) -> Node:
    """Add up sites whose parts differ in the last dimension only, so that they can be concatenated along it."""
    counts = _joined(graph, [part for site in sites for part in site.counts])
    moments = [part for site in sites for part in site.moments]
    rows, elements, measured, scaled, short = (
        [getattr(site, name) for site in sites] for name in ("row", "elements", "measured", "scaled", "short")
    )
    sizes = [site.shape[-1] for site in sites]
    joined = _joined(graph, moments) if moments else counts
    return Totals(counts, joined, table, rows, sizes, elements, measured, scaled, short).insert(graph)


def _joined(graph: Graph, parts: list[Node]) -> Node:
    return call(graph, aten.cat.default, parts, -1) if len(parts) > 1 else parts[0]


def _counted(graph: Graph, position: int, node: Node, rows: WatchedRows, pieces: Sequence[Node]) -> _Site | None:
    """Count in parts what ``node`` counts; None if the tensor has no parts of known sizes."""
    count, tensors = Count.of(node), pieces or (Count.of(node).x,)
    measured, scaled = count.row in rows.measured, count.row in rows.scaled
    dims = [found for found in (_part(tensor_of(x)) for x in tensors) if found is not None]
    if len(dims) < len(tensors):
        return None
    lengths = [math.prod(tensor_of(x).shape[d] for d in of_x) for x, of_x in zip(tensors, dims, strict=True)]
    short = max(lengths) < stats.SHORT
    with graph.inserting_before(node):
        found = [
            _counted_piece(graph, node, x, d, (scaled, measured, short)) for x, d in zip(tensors, dims, strict=True)
        ]
    shapes, parts = zip(*found, strict=True)
    if len({shape[:-1] for shape in shapes}) > 1:
        return None
    shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    elements = sum(tensor_of(x).numel() for x in tensors)
    return _Site(position, count.row, elements, measured, scaled, shape, tuple(zip(*parts, strict=True)), short)


def _counted_piece(
    graph: Graph, node: Node, x: Node, dims: tuple[int, ...], how: tuple[bool, bool, bool]
) -> tuple[tuple[int, ...], tuple[Node, ...]]:
    """Count ``x`` in parts, as ``node`` counts; return the shape of the parts, and each of their numbers."""
    count, val = Count.of(node), tensor_of(x)
    if len(dims) == val.ndim:
        x, val, dims = call(graph, aten.unsqueeze.default, x, 0), val.unsqueeze(0), tuple(d + 1 for d in dims)
        x.meta["val"] = val
    simulated = any(cast.is_simulated for _, cast in Quantize.among(count.x.users))
    last = tuple(d - val.ndim for d in dims)
    parts = counted_parts(graph, count, x, last, None if simulated else count.format, *how)
    return tuple(int(size) for d, size in enumerate(val.shape) if d not in dims), parts


def _part(x: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions, innermost in memory, that form a part; None for a scalar or unknown sizes or strides."""
    if not all(isinstance(n, int) for n in (*x.shape, *x.stride())) or not x.numel() or not x.ndim:
        return None
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda d: (-strides[d], d))
    dims: list[int] = []
    length = 1
    while len(dims) < x.ndim and length < _PART:
        dims.append(order[-1 - len(dims)])
        if x.stride(dims[-1]) != length and x.shape[dims[-1]] > 1:
            return None
        length *= x.shape[dims[-1]]
    return tuple(sorted(dims)) if x.ndim < MOST_DIMS and length < _LONGEST else None
