"""Cast a tensor in pieces where it is read in pieces: one product gives both halves of a gated layer.

A kernel that reads a piece and a kernel that rounds the whole tensor loop over different shapes. Inductor does not fuse
them, so the product would be read twice. Here the kernel that reads the pieces also rounds them.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from fxprec import compat
from fxprec.ir.operators import Moves, moving_as
from fxprec.ir.symbolic import Count, KeepCodes, KeepNonfinite, Quantize
from fxprec.kernels.layout import SideBySide
from fxprec.passes.analysis.joint import argument, input_at, tensor_of
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.lowering.gemm_casts import call, substitute

aten = torch.ops.aten
_RESHAPING = moving_as(Moves.SHAPE)
_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default})


def cast_in_pieces(graph: Graph, counts: list[Node]) -> dict[Node, list[Node]]:
    """Rewrite casts of tensors that are read or made in pieces; return for each count the pieces to count instead."""
    counted: dict[Node, list[Node]] = {}
    of_row = {Count.of(node).row: node for node in counts}
    for q, cast in Quantize.among(Quantize.nodes(graph)):
        count = of_row.get(cast.row)
        if pieces := _read_in_pieces(q, cast):
            last = max(pieces)
            with graph.inserting_before(last.next):
                substitute(graph, q, _written(graph, q, _casts(graph, q, cast, pieces)))
            if count is not None:
                last.append(count)
        elif pieces := _made_in_pieces(q, cast, count):
            with graph.inserting_before(q):
                _join_codes(graph, q, _casts(graph, q, cast, pieces), pieces)
        if pieces and count is not None:
            counted[count] = pieces
    return counted


def _read_in_pieces(q: Node, cast: Quantize) -> list[Node]:
    """Return the pieces in which a cast's input is read, if its codes are only returned from the graph."""
    return _pieces(cast.x) if all(user.op == "output" for user in q.users) else []


def _made_in_pieces(q: Node, cast: Quantize, count: Node | None) -> list[Node]:
    """Return the pieces that are computed, then joined, then only rounded: a gated layer's gradient.

    A kernel over the whole tensor computes every piece at each element. A kernel over one piece's shape computes all
    pieces, and their common parts once.
    """
    readers, x = {q, *_kept(q)}, cast.x
    if len(readers) > 1 and len(q.users) > 1:
        return []
    while x.target in _RESHAPING and readers.issuperset(user for user in x.users if user is not count):
        source = x.all_input_nodes[0]
        if not _keeps_last(source, x):
            return []
        readers, x = {x, *readers}, source
    if x.target is not aten.cat.default or not readers.issuperset(user for user in x.users if user is not count):
        return []
    pieces = _joined_last(x)
    return pieces if all(_is_computed(piece) for piece in pieces) else []


def _kept(q: Node) -> list[Node]:
    """Return the nodes that put the codes of inf and NaN into a cast's codes."""
    return [user for user in q.users if (KeepNonfinite.match(user) or KeepCodes.match(user)) is not None]


def _join_codes(graph: Graph, q: Node, casts: list[Node], pieces: list[Node]) -> None:
    """Replace a cast's codes, with those of inf and NaN, by codes that are written piece by piece."""
    end = q
    for end in _kept(q):
        keep = KeepNonfinite.match(end) or KeepCodes.match(end)
        assert keep is not None
        casts = [replace(keep, rounded=rounded, x=x).insert(graph) for rounded, x in zip(casts, pieces, strict=True)]
        _set_values(casts, pieces, end)
    substitute(graph, end, _written(graph, end, casts))
    if end is not q:
        graph.erase_node(q)


def narrow_in_pieces(graph: Graph) -> None:
    """Convert pieces before they are joined along the last dimension, instead of after, each written into the result.

    This applies to a gated layer's gradient on GPUs without fp8. Decoding a code takes many operations, so a kernel
    over the whole tensor cannot hold Inductor's intermediates of a piece: they are written in float32 and read again.
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
    """Return the tensors that ``cat`` joins, if it joins them along the last dimension; otherwise none."""
    rank, pieces, dim = tensor_of(cat).ndim, argument(cat, 0), argument(cat, 1, 0)
    assert isinstance(pieces, list | tuple)
    return [p for p in pieces if isinstance(p, Node)] if isinstance(dim, int) and dim % rank == rank - 1 else []


def _is_computed(x: Node) -> bool:
    """Return whether a kernel computes ``x`` element by element, rather than a library call or a copy."""
    return isinstance(x.target, torch._ops.OpOverload) and torch.Tag.pointwise in x.target.tags


def _casts(graph: Graph, q: Node, cast: Quantize, pieces: list[Node]) -> list[Node]:
    casts = [replace(cast, x=piece).insert(graph) for piece in pieces]
    _set_values(casts, pieces, q)
    return casts


def _set_values(made: list[Node], pieces: list[Node], whole: Node) -> None:
    for new, piece in zip(made, pieces, strict=True):
        new.meta["val"] = tensor_of(piece).to(tensor_of(whole).dtype)


def _written(graph: Graph, whole: Node, codes: list[Node]) -> Node:
    """Write the codes of the pieces side by side."""
    compat.writes_in_place(SideBySide.target)
    return call(graph, aten.view.default, SideBySide(codes).insert(graph), list(tensor_of(whole).shape))


def _pieces(x: Node) -> list[Node]:
    """Return the pieces into which ``x``, perhaps reshaped, is split along the last dimension; otherwise none."""
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
