"""Remove round trips bfloat16 -> float32 -> bfloat16, which keep every bit and cost two passes over memory.

Round trips lie between two GEMMs with only views and concatenations between them. Others lie between a GEMM and its
result's stored copy, if the copy has the dtype that the GEMM returned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxprec.ir.symbolic import Dequantize, Quantize, is_in_blocks
from fxprec.numerics.formats import parse
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.block_copies import Refusals, wanted_block_formats
from fxprec.passes.analysis.joint import is_backward, operator_of, shown, value
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.base import Pass, Work
from fxprec.passes.sites import emit, emit_on, replace_node

_CAT = torch.ops.aten.cat.default


@dataclass(frozen=True)
class DropRoundTrips(Pass):
    """Read a 16-bit value directly where it would be widened, viewed and narrowed again."""

    name: str = "drop-round-trips"

    def apply(self, work: Work) -> None:
        graph, refusals = work.joint.graph, Refusals(work)
        for node in list(graph.nodes):
            cast = Quantize.match(node)
            if node.target is CONVERT:
                _converted(graph, node)
            elif node.target is _CAT:
                _joined(graph, node)
            elif cast is not None and _stays_in_16_bits(work, refusals, node, cast):
                _stored(graph, node, cast)


def _stays_in_16_bits(work: Work, refusals: Refusals, q: Node, cast: Quantize) -> bool:
    """Return whether a copy has bfloat16's range, and choose-crossings stores it in no block format."""
    if is_in_blocks(cast.format) or not parse(cast.format).has_float32_range:
        return False
    site = work.book.sites[cast.row]
    formats = [] if work.fits_peak or is_backward(q) else wanted_block_formats(work, site, q)
    return all(refusals.of(site, q, fmt) is not None for fmt in formats)


def _converted(graph: Graph, node: Node) -> None:
    x = node.all_input_nodes[0]
    narrow = _as_it_was(graph, node, x, node.meta["val"].dtype)
    if narrow is not None:
        replace_node(node, narrow)


def _stored(graph: Graph, q: Node, cast: Quantize) -> None:
    """Replace a stored copy by the narrow value itself."""
    narrow = _as_it_was(graph, q, cast.x, q.meta["val"].dtype)
    if narrow is None or parse(cast.format).torch_dtype != q.meta["val"].dtype:
        return
    for x, read in Dequantize.among(q.users):
        new = narrow
        if read.dtype != narrow.meta["val"].dtype:
            with graph.inserting_before(x):
                new = emit(graph, CONVERT, (narrow, read.dtype), x, val=x.meta["val"])
            if regions.is_marked(x):  # a policy may save the value, but not this conversion of it
                new.meta[regions.POLICY] = CheckpointPolicy.MUST_RECOMPUTE
        replace_node(x, new)
    if not q.users:
        graph.erase_node(q)


def _joined(graph: Graph, cat: Node) -> None:
    """Concatenate narrow values if all pieces were widened from one dtype, and widen the result instead."""
    pieces = cat.all_input_nodes
    first, _ = shown(pieces[0])
    source = value(first.all_input_nodes[0]) if first.target is CONVERT else None
    if source is None:
        return
    narrow = {piece: _as_it_was(graph, cat, piece, source.dtype) for piece in pieces}
    if None in narrow.values():
        return
    with graph.inserting_before(cat):
        args = torch.fx.map_arg(cat.args, narrow.__getitem__)
        narrow_val = cat.meta["val"].to(source.dtype)
        joined = emit(graph, operator_of(cat), args, cat, kwargs=cat.kwargs, val=narrow_val)
        wide = emit(graph, CONVERT, (joined, cat.meta["val"].dtype), cat, val=cat.meta["val"])
    replace_node(cat, wide)


def _as_it_was(graph: Graph, reader: Node, x: Node, dtype: torch.dtype) -> Node | None:
    """Return the ``dtype`` value that ``x`` was widened from, with the views repeated; None if there is none."""
    x, views = shown(x)
    if x.target is not CONVERT:
        return None
    found, wide = x.all_input_nodes[0], value(x)
    source = value(found)
    if source is None or wide is None or source.dtype != dtype or not _holds(wide.dtype, dtype):
        return None
    with graph.inserting_before(reader):
        for view in reversed(views):
            # The fake value is computed anew: converting the wide view's would change a part's strides.
            found = emit_on(graph, view, found)
    return found


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether the wide dtype represents every number of the narrow dtype."""
    return wide == torch.float32 and narrow in (torch.bfloat16, torch.float16)
