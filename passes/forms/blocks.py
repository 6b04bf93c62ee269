"""Keep a copy in a block format, with a mask beside it if backward tests whether the value is above 0."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxprec.numerics.blocks import SIGNS, WHOLE_BITS, BlockFormat
from fxprec.numerics.formats import Format
from fxprec.passes.analysis.joint import numel_hint
from fxprec.passes.analysis.replay.kernels import Kind
from fxprec.passes.analysis.ways import Demand, Form, row_of
from fxprec.passes.casts.blocks import store_in_blocks
from fxprec.passes.forms.stage import Stage
from fxprec.plan.rows import Site


@dataclass(frozen=True)
class Blocks(Form):
    """A copy in a block format that all its readers tolerate. No other value is recomputed from the copy."""

    format: BlockFormat
    row_format: Format
    """The format in the value's row of the plan, whose ``saved_as`` names the block format."""
    has_mask: bool = False

    serves = frozenset({Demand.READ, Demand.READ_LOW})
    counted = "in blocks"
    options = frozenset({"blocks"})
    kernel = Kind.EXTERN
    is_rounded = True

    @property
    def is_random(self) -> bool:  # type: ignore[override]
        """Return whether the copy is rounded at random."""
        return self.format.bits < WHOLE_BITS

    def num_bytes(self, val: torch.Tensor) -> int:
        elements = numel_hint(val)
        return self.format.num_bytes(elements) + (SIGNS.num_bytes(elements) if self.has_mask else 0)

    def store(self, value: Node, stage: Stage) -> None:
        seed = stage.seed if self.is_random else None
        (q,) = stage.casts.pop(value)
        if not store_in_blocks(stage.graph, q, self.format, seed):
            stage.only_masks.add(value)

    def saved_as(self, value: Node, stage: Stage) -> str:
        """Return the name of the block format that ``value`` is stored in, or of the mask if only its mask is read."""
        return (SIGNS if value in stage.only_masks else self.format).name

    def plan_row(self, site: Site, value: Node, stage: Stage) -> Site:
        return replace(row_of(site, "narrow", self.row_format.name, ""), saved_as=self.saved_as(value, stage))

    def matches_row(self, site: Site) -> bool:
        return site.way == "narrow" and site.saved_as == self.format.name and site.promoted_at is None
