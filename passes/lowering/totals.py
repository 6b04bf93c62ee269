"""Count statistics on a GPU: the kernel that computes a value counts it row by row; one more kernel adds all rows up.

Inductor fuses a reduction along rows with the kernel that computes the values. It splits a reduction of all elements
into parts that do not fuse with that kernel, so the values would be written and read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fxprec.ir.symbolic import Count, Quantize
from fxprec.kernels.counts import Totals
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.lowering.expand import MOST_DIMS, counted_parts
from fxprec.passes.lowering.gemm_casts import call
from fxprec.passes.lowering.rows import WatchedRows

aten = torch.ops.aten
_PART = 256  # elements; 12 bytes of counts are then a small share
_LONGEST = 1 << 21  # elements whose counts fit into the fields of one number


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
    """For each piece of the tensor, the counts of its parts: losses, largest magnitudes, three moments if measured."""


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
    lost, amax = (_joined(graph, [part for site in sites for part in site.parts[i]]) for i in range(2))
    moments = [part for site in sites for parts in site.parts[2:] for part in parts]
    rows, elements, measured, scaled = (
        [getattr(site, name) for site in sites] for name in ("row", "elements", "measured", "scaled")
    )
    sizes = [site.shape[-1] for site in sites]
    joined = _joined(graph, moments) if moments else amax
    return Totals(lost, amax, joined, table, rows, sizes, elements, measured, scaled).insert(graph)


def _joined(graph: Graph, parts: list[Node]) -> Node:
    return call(graph, aten.cat.default, parts, -1) if len(parts) > 1 else parts[0]


def _counted(graph: Graph, position: int, node: Node, rows: WatchedRows, pieces: Sequence[Node]) -> _Site | None:
    """Count in parts what ``node`` counts; None if the tensor has no parts of known sizes."""
    count = Count.of(node)
    measured, scaled = count.row in rows.measured, count.row in rows.scaled
    found = [_counted_piece(graph, node, x, scaled, measured) for x in pieces or (count.x,)]
    if None in found or len({shape[:-1] for shape, _ in filter(None, found)}) > 1:
        return None
    shapes, parts = zip(*filter(None, found), strict=True)
    shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    elements = sum(tensor_of(x).numel() for x in pieces or (count.x,))
    return _Site(position, count.row, elements, measured, scaled, shape, tuple(zip(*parts, strict=True)))


def _counted_piece(
    graph: Graph, node: Node, x: Node, scaled: bool, measured: bool
) -> tuple[tuple[int, ...], tuple[Node, ...]] | None:
    """Count ``x`` in parts, as ``node`` counts; return the shape of the parts, and the counts of each kind."""
    count, val = Count.of(node), tensor_of(x)
    dims = _part(val)
    if dims is None:
        return None
    simulated = any(cast.is_simulated for _, cast in Quantize.among(count.x.users))
    with graph.inserting_before(node):
        if len(dims) == val.ndim:
            x, val, dims = call(graph, aten.unsqueeze.default, x, 0), val.unsqueeze(0), tuple(d + 1 for d in dims)
            x.meta["val"] = val
        dims = tuple(d - val.ndim for d in dims)
        parts = counted_parts(graph, count, x, dims, None if simulated else count.format, scaled, measured)
    return tuple(int(size) for d, size in enumerate(val.shape) if d - val.ndim not in dims), parts


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
