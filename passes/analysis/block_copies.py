"""Decide which stored copies may use a block format instead, and why the others may not."""

from __future__ import annotations

from functools import cached_property

import torch
from torch.fx import Node

from fxprec.ir.symbolic import Dequantize
from fxprec.numerics.blocks import WHOLE_BITS, BlockFormat, Integer, find_blocks
from fxprec.numerics.formats import parse
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import is_view_or_cast, readers, shape_text, tensor_of
from fxprec.passes.analysis.signs import is_compared_with_0
from fxprec.passes.analysis.unbiased import Order
from fxprec.passes.base import Work
from fxprec.plan import Site

ATTENDED = BlockFormat(Integer(8), 32, "bf16")
"""The format of copies that only attention's backward reads, queries and keys above all, if a recipe saves in fewer
than 8 bits. Its error is at most 1/510 of the range of 32 elements, a fifth of e4m3fn's."""


class Refusals:
    """Says for one graph which stored copies cannot use a block format, and why."""

    def __init__(self, work: Work) -> None:
        self.work = work

    @cached_property
    def order(self) -> Order:
        """Return the graph's nodes by position, numbered at first use."""
        return Order.of(self.work.joint)

    def of(self, site: Site, q: Node, fmt: BlockFormat) -> str | None:
        """Return why a copy cannot be stored in blocks of ``fmt``, or None if it can.

        ``""``: there is no copy in 8 bits that backward alone reads, and so nothing to refuse.
        """
        is_exact = fmt.bits >= WHOLE_BITS
        if site.reads != "backward":
            return ""
        if parse(site.format).bits > WHOLE_BITS and not (is_exact and _is_attended(q)):
            return ""
        val = tensor_of(q)
        if any(isinstance(size, torch.SymInt) for size in val.shape):
            return f"its shape {shape_text(val)} is dynamic, and blocks are counted when the graph is compiled"
        reads = [x for x, _ in Dequantize.among(q.users)]
        size = fmt.num_bytes(val.numel())
        if size >= val.numel() * (self.work.settings.recipe.hi.bits // 8 if is_exact else 1):
            return f"its {val.numel()} elements take {size} bytes in it, which saves nothing"
        if is_exact:
            is_compared = any(is_compared_with_0(read) for read in reads)
            return "backward tests its sign, and a block's scale may round it to 0" if is_compared else None
        biased = self._biased_by(reads, fmt)
        return None if biased is None else self._also_read_by(biased)

    def _biased_by(self, reads: list[Node], fmt: BlockFormat) -> Node | None:
        """Return a reader that does not tolerate errors, if possible in the backward of an operator of the model."""
        exempt = set[Node]()
        first = biased = self.order.biased_by(reads, fmt.bits, exempt)
        while biased is not None and biased not in self.work.operators.of_backward_node:
            exempt = {*exempt, biased}
            biased = self.order.biased_by(reads, fmt.bits, exempt)
        return biased or first

    def _also_read_by(self, reader: Node) -> str:
        op = self.work.operators.of_backward_node.get(reader)
        name = reader.name if op is None else op.aten
        return (
            f"the backward of {name[:60]} reads it too, where rounding noise does not average out as it does in a "
            "weight's gradient"
        )


def wanted_block_formats(work: Work, site: Site, q: Node) -> list[BlockFormat]:
    """Return the block format that the recipe or the given plan wants for a copy, as a list of at most one."""
    if work.given is not None:
        name = work.given.sites[site.id].saved_as
        return [find_blocks(name)] if name else []
    saved = work.settings.recipe.saved
    if saved is None:
        return []
    return [ATTENDED if saved.bits < WHOLE_BITS and _is_attended(q) else saved]


def _is_attended(q: Node) -> bool:
    """Return whether only attention's backward reads a copy, or parts of it."""
    found = [reader for read, _ in Dequantize.among(q.users) for _, reader in readers(read, is_view_or_cast)]
    return bool(found) and all(reader.target in ops.ATTENTION_BACKWARD for reader in found)
