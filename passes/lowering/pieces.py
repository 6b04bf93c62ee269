"""Cast in pieces what is read in pieces: the gate and the other half of a gated layer come out of one product.

A kernel goes over a piece, one that rounds the whole over the whole: two shapes, so Inductor fuses them not, and the
product is read twice. Rounded piece by piece, the codes come out of the kernel that reads the pieces anyway.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from fxprec import compat
from fxprec.ir.operators import Moves, moving_as
from fxprec.ir.symbolic import Count, Quantize, SideBySide
from fxprec.passes.analysis.joint import argument, input_at, tensor_of
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.lowering.gemm_casts import call, substitute

aten = torch.ops.aten
_RESHAPING = moving_as(Moves.SHAPE)
_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default})


def cast_in_pieces(graph: Graph, counts: list[Node]) -> dict[Node, list[Node]]:
    """Rewrite casts whose codes only leave the graph; return what to count in the place of each count's value."""
    counted: dict[Node, list[Node]] = {}
    of_row = {Count.of(node).row: node for node in counts}
    for q, cast in Quantize.among(Quantize.nodes(graph)):
        pieces = _pieces(cast.x) if all(user.op == "output" for user in q.users) else []
        if not pieces:
            continue
        last = max(pieces)
        with graph.inserting_before(last.next):
            codes = _written(graph, q, cast, pieces)
        if cast.row in of_row:
            counted[of_row[cast.row]] = pieces
            last.append(of_row[cast.row])
        substitute(graph, q, codes)
    return counted


def narrow_in_pieces(graph: Graph) -> None:
    """Convert each piece of what is joined along the last dimension and then converted, and write it where it belongs.

    As a gated layer's gradient on GPUs without fp8. A kernel over the whole cannot hold what Inductor keeps of a piece
    on the way, since the decoding of a code is long: it is written out in float32 and read again.
    """
    for node in graph.find_nodes(op="call_function", target=CONVERT):
        joined, dtype = input_at(node, 0), argument(node, 1)
        pieces = _joined_last(joined) if joined.target is aten.cat.default and len(joined.users) == 1 else []
        if not pieces or not all(_is_computed(piece) for piece in pieces):
            continue
        with graph.inserting_before(node):
            narrow = [call(graph, CONVERT, piece, dtype) for piece in pieces]
            for new, piece in zip(narrow, pieces, strict=True):
                new.meta["val"] = tensor_of(piece).to(node.meta["val"].dtype)
            compat.writes_in_place(SideBySide.target)
            substitute(graph, node, SideBySide(narrow).insert(graph))
        graph.erase_node(joined)


def _joined_last(cat: Node) -> list[Node]:
    """Return what ``cat`` joins, if along the last dimension."""
    rank, pieces, dim = tensor_of(cat).ndim, argument(cat, 0), argument(cat, 1, 0)
    assert isinstance(pieces, list | tuple)
    return [p for p in pieces if isinstance(p, Node)] if isinstance(dim, int) and dim % rank == rank - 1 else []


def _is_computed(x: Node) -> bool:
    """Say whether a kernel computes ``x`` element by element, rather than a library call or a copy."""
    return isinstance(x.target, torch._ops.OpOverload) and torch.Tag.pointwise in x.target.tags


def _written(graph: Graph, q: Node, cast: Quantize, pieces: list[Node]) -> Node:
    """Write the codes of the pieces side by side."""
    casts = [replace(cast, x=piece).insert(graph) for piece in pieces]
    for new, piece in zip(casts, pieces, strict=True):
        new.meta["val"] = tensor_of(piece).to(tensor_of(q).dtype)
    compat.writes_in_place(SideBySide.target)
    return call(graph, aten.view.default, SideBySide(casts).insert(graph), list(tensor_of(q).shape))


def _pieces(x: Node) -> list[Node]:
    """Return the pieces that a split along the last dimension makes of ``x``, perhaps in another shape; or none."""
    for user in x.users:
        if user.target in _RESHAPING and _keeps_last(x, user):
            if pieces := _pieces(user):
                return pieces
        elif user.target in _SPLITS and _along_last(user):
            items = {argument(item, 1): item for item in user.users if item.target is operator.getitem and item.users}
            if len(items) == len(user.meta["val"]) > 1:
                return [items[i] for i in range(len(items))]
    return []


def _keeps_last(x: Node, shown: Node) -> bool:
    sizes = (*tensor_of(x).shape[-1:], *tensor_of(shown).shape)
    return all(isinstance(size, int) for size in sizes) and sizes[0] == sizes[-1]


def _along_last(split: Node) -> bool:
    rank, dim = tensor_of(split.all_input_nodes[0]).ndim, argument(split, 2, 0)
    return isinstance(dim, int) and dim % rank == rank - 1
