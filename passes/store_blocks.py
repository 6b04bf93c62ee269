"""Store in a block format of few bits what only the gradients of weights are made of.

Rounded at random, such a copy gives those gradients the right mean (`linear_readers`). What a ReLU's backward asks of
it, whether it is above 0, is a mask of one bit beside it; whatever else backward reads stays in the recipe's 8 bits.
Definitions: docs/compute.md, "Fewer than 8 bits".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from fxprec.ir.symbolic import Dequantize, Quantize
from fxprec.ir.symbolic_blocks import DequantizeBlocks, QuantizeBlocks, TensorScale
from fxprec.numerics.blocks import BlockFormat, Integer, find_blocks
from fxprec.numerics.formats import parse
from fxprec.passes.analysis.joint import is_backward, shape_text, tensor_of
from fxprec.passes.analysis.linear_readers import linear_readers
from fxprec.passes.base import Notice, Work
from fxprec.passes.casts.sites import emit, emit_call
from fxprec.passes.keep_signs import asks_above, asks_sign
from fxprec.plan import Site

aten = torch.ops.aten
_ALIASES = (aten.alias.default, aten.detach.default)
SIGNS = BlockFormat(Integer(1), 1024, "bf16")
"""Of what is above 0: 0 and 1 are exact in it."""
WHOLE_BITS = 8
"""From here on a block format is as accurate as the formats that backward reads anywhere, and is rounded to nearest."""


@dataclass(frozen=True)
class StoreBlocks:
    """Turn casts that only weight gradients read into casts to the recipe's ``saved`` format."""

    name: str = "store-blocks"

    def apply(self, work: Work) -> None:
        if not work.computes_high:
            return
        seed: Node | None = None
        graph = work.joint.graph
        casts = {cast.row: q for q, cast in Quantize.among(Quantize.nodes(graph)) if not is_backward(q)}
        for site in list(work.book.sites):
            fmt, q = _wanted(work, site), casts.get(site.id)
            reason = None if fmt is None else _refusal(work, site, q, fmt)
            if fmt is None or q is None or reason is not None:
                _tell(work, site, fmt, reason)
                continue
            if fmt.bits < WHOLE_BITS:
                seed = _seed(graph, q) if seed is None else seed
                _ask_mask(graph, q)
            has_readers = _store(graph, q, fmt, seed if fmt.bits < WHOLE_BITS else None)
            work.book.sites[site.id] = replace(site, saved_as=(fmt if has_readers else SIGNS).name)


def _wanted(work: Work, site: Site) -> BlockFormat | None:
    """Return the format a site is to be saved in: the given plan's, else the recipe's."""
    if work.given is None:
        return work.settings.recipe.saved
    name = work.given.sites[site.id].saved_as
    return find_blocks(name) if name else None


def _tell(work: Work, site: Site, fmt: BlockFormat | None, reason: str | None) -> None:
    """Say why a low tensor is in 8 bits; where the given plan wants it in blocks, as a notice."""
    if fmt is None or reason is None:
        return
    if reason and not site.why:
        work.book.sites[site.id] = replace(site, why=f"{fmt.name} is no choice: {reason}")
    if work.given is not None:
        why = (
            reason or f"no copy in 8 bits is saved of it for backward alone{f', since {site.why}' if site.why else ''}"
        )
        detail = f"sites[{site.id}].saved_as of the given plan is {fmt.name!r}, and it stays in {site.format}: {why}"
        work.notices.append(Notice(f"{site.tensor} ({site.module})" if site.module else site.tensor, detail))


def _refusal(work: Work, site: Site, q: Node | None, fmt: BlockFormat) -> str | None:
    """Return why a copy may not be stored in blocks of ``fmt``; ``""`` where there is none in 8 bits."""
    if q is None or site.reads != "backward" or parse(site.format).bits > WHOLE_BITS:
        return ""
    val = tensor_of(q)
    if any(isinstance(size, torch.SymInt) for size in val.shape):
        return f"its shape {shape_text(val)} is dynamic, and blocks are counted when the graph is compiled"
    is_exact = fmt.bits >= WHOLE_BITS
    (read,) = [x for x, _ in Dequantize.among(q.users)]
    masks = SIGNS.num_bytes(val.numel()) if _asking(read) and not is_exact else 0
    size, most = fmt.num_bytes(val.numel()), val.numel() * (work.settings.recipe.hi.bits // 8 if is_exact else 1)
    if size + masks >= most:
        return f"its {val.numel()} elements take {size + masks} bytes in it, no fewer"
    if is_exact:
        return "backward asks for its sign, which a block's scale may round to 0" if asks_sign(read) else None
    asking = {reader for _, reader in _asking(read)}
    others = [reader for reader in linear_readers(read)[1] if reader not in asking]
    return _also_read_by(others[0], work) if others else None


def _asking(read: Node) -> list[tuple[Node, Node]]:
    """Return (the copy or an alias, who in backward asks whether it is above 0, and nothing else)."""
    found = [(read, user) for user in read.users if is_backward(user) and asks_above(user)]
    return found + [pair for user in read.users if user.target in _ALIASES for pair in _asking(user)]


def _also_read_by(reader: Node, work: Work) -> str:
    op = work.operators.of_backward_node.get(reader)
    name = reader.name if op is None else op.aten
    return f"the backward of {name[:60]} reads it too, where noise does not average out as in a weight's gradient"


def _seed(graph: Graph, before: Node) -> Node:
    """Draw the step's seed from torch's generator, once for all casts."""
    with graph.inserting_before(before):
        device = tensor_of(before).device
        drawn = tensor_of(before).new_empty(1, dtype=torch.int32)
        seed = emit(graph, aten.randint.low, (-(1 << 31), 1 << 31, [1]), before, val=drawn)
        seed.kwargs = {"dtype": torch.int32, "device": device}
    return seed


def _ask_mask(graph: Graph, q: Node) -> None:
    """Give what asks whether a copy is above 0 a mask of its own, a bit an element and exact."""
    cast = Quantize.of(q)
    ((read, _),) = Dequantize.among(q.users)
    asking = _asking(read)
    if not asking:
        return
    with graph.inserting_before(q):
        mask = emit(graph, aten.gt.Scalar, (cast.x, 0), q)
    shown = _through_blocks(graph, mask, q, read, SIGNS, None, torch.bfloat16)
    for alias, user in asking:
        user.replace_input_with(alias, shown)
        while alias is not read and not alias.users:
            source = alias.all_input_nodes[0]
            graph.erase_node(alias)
            alias = source


def _store(graph: Graph, q: Node, fmt: BlockFormat, seed: Node | None) -> bool:
    """Replace a cast by one to blocks; return whether anything reads it."""
    ((read, call),) = Dequantize.among(q.users)
    has_readers = bool(read.users)
    if has_readers:
        shown = _through_blocks(graph, Quantize.of(q).x, q, read, fmt, seed, call.dtype)
        read.replace_all_uses_with(shown)
    graph.erase_node(read)
    graph.erase_node(q)
    return has_readers


def _through_blocks(
    graph: Graph, x: Node, q: Node, read: Node, fmt: BlockFormat, seed: Node | None, dtype: torch.dtype
) -> Node:
    """Store a value where ``q`` stores it, and return it as it is read where ``read`` reads it."""
    val, row = tensor_of(x), Quantize.of(q).row
    order = _memory_order(val)
    with graph.inserting_before(q):
        x = emit(graph, aten.permute.default, (x, order), q) if order else x
        whole = emit_call(graph, TensorScale(x, fmt.name), q) if fmt.tensor_scale else None
        stored = emit_call(graph, QuantizeBlocks(x, seed, whole, row, fmt.name), q)
    with graph.inserting_before(read):
        flat = emit_call(graph, DequantizeBlocks(stored, whole, row, fmt.name, val.numel(), dtype), read)
        shown = emit(graph, aten.view.default, (flat, list(tensor_of(x).shape)), read)
        if order:
            shown = emit(graph, aten.permute.default, (shown, [order.index(d) for d in range(val.ndim)]), read)
    return shown


def _memory_order(val: torch.Tensor) -> list[int] | None:
    """Return the dimensions from the slowest to the fastest in memory; None where that is their own order, or none."""
    if val.is_contiguous() or not aten.is_non_overlapping_and_dense(val):
        return None
    return sorted(range(val.ndim), key=lambda d: -val.stride()[d])
