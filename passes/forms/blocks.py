"""Keep a copy in a block format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.fx import Node

from fxprec.config.ways import BLOCK_WAYS
from fxprec.ir.symbolic import Dequantize, Quantize, TensorScale
from fxprec.numerics.blocks import WHOLE_BITS, BlockFormat, find_blocks
from fxprec.numerics.formats import Format
from fxprec.passes.analysis.block_copies import wanted_block_formats
from fxprec.passes.analysis.joint import is_dense, memory_order, tensor_of
from fxprec.passes.analysis.replay.kernels import Kind
from fxprec.passes.analysis.ways import Demand, rounding_error, row_of
from fxprec.passes.base import Work
from fxprec.passes.forms.candidate import Candidate
from fxprec.passes.forms.encoded import Encoded
from fxprec.passes.forms.stage import Emitter, Stage
from fxprec.plan.rows import Site

aten = torch.ops.aten


@dataclass(frozen=True)
class Blocks(Encoded):
    """A copy in a block format that all its readers tolerate, its elements in memory order."""

    format: BlockFormat
    row_format: Format
    """The format in the value's row of the plan, whose ``saved_as`` names the block format."""

    serves = frozenset({Demand.READ, Demand.READ_LOW})
    counted = "in blocks"
    options = frozenset({"blocks"})
    ways = BLOCK_WAYS
    missing = "backward reads no 8-bit copy"
    kernel = Kind.EXTERN

    @classmethod
    def offers(cls, value: Candidate) -> Iterator[Self]:
        """Yield the formats that all readers tolerate."""
        if len(value.casts) != 1 or value.is_read_as_it_is:
            return
        assert value.site is not None, "what has a cast has a site"
        work, (q,) = value.work, value.casts
        formats = find_formats(work) if work.fits_peak else wanted_block_formats(work, value.site, q)
        reasons = {fmt: value.refusals.of(value.site, q, fmt) for fmt in formats}
        found = [cls(fmt, value.low or work.settings.recipe.hi) for fmt, reason in reasons.items() if reason is None]
        if not found:
            value.refused |= {fmt.name: why for fmt, why in reasons.items() if why}
        yield from found

    @classmethod
    def is_asked(cls, work: Work) -> bool:
        return super().is_asked(work) or work.settings.recipe.saved is not None

    @classmethod
    def is_used_at_any_cost(cls, work: Work) -> bool:
        return not work.fits_peak

    @property
    def way(self) -> str:
        return self.format.name

    @property
    def error(self) -> float:
        return rounding_error(self.format)

    @property
    def is_random(self) -> bool:  # type: ignore[override]
        """Return whether the copy is rounded at random."""
        return self.format.bits < WHOLE_BITS

    def encode(self, value: Node, cast: Node, stage: Stage, emit: Emitter) -> Sequence[Node]:
        order = _order(tensor_of(value))
        x = emit(aten.permute.default, (value, order)) if order else value
        whole = emit.call(TensorScale(x, self.format.name)) if self.format.tensor_scale else None
        seed = stage.seed if self.is_random else None
        return [emit.call(replace(Quantize.of(cast), x=x, format=self.format.name, seed=seed, whole=whole))]

    def decode(self, saved: Sequence[Node], value: Node, dtype: torch.dtype, emit: Emitter) -> Node:
        (q,), val = saved, tensor_of(value)
        order = _order(val)
        shape = [val.shape[d] for d in order or range(val.ndim)]
        x = emit.call(Dequantize.like(Quantize.of(q), q=q, dtype=dtype, elements=val.numel()))
        x = emit(aten.view.default, (x, shape))
        return emit(aten.permute.default, (x, [order.index(d) for d in range(val.ndim)])) if order else x

    def plan_row(self, site: Site, value: Node, stage: Stage) -> Site:
        return replace(row_of(site, "narrow", self.row_format.name, ""), saved_as=self.format.name)

    def matches_row(self, site: Site) -> bool:
        return site.way == "narrow" and site.saved_as == self.format.name and site.promoted_at is None


def find_formats(work: Work) -> list[BlockFormat]:
    """Return the block formats that a peak budget may choose: from a given plan, from ``ways``, or from the recipe."""
    if work.given is not None:
        return [find_blocks(name) for name in sorted({site.saved_as for site in work.given.sites} - {""})]
    saved, block_ways = work.settings.recipe.saved, [way for way in work.settings.ways if way in BLOCK_WAYS]
    return [find_blocks(way) for way in block_ways] or (
        [saved] if saved is not None and work.settings.asked.ways is None else []
    )


def _order(val: torch.Tensor) -> list[int] | None:
    """Return the dimensions from slowest to fastest in memory; None if contiguous, or not dense."""
    return None if val.is_contiguous() or not is_dense(val) else memory_order(val)
