"""Keep a copy in a block format."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Node

from fxprec.numerics.blocks import WHOLE_BITS, BlockFormat
from fxprec.numerics.formats import Format
from fxprec.passes.analysis.replay.kernels import Kind
from fxprec.passes.analysis.ways import Demand, Form, rounding_error, row_of
from fxprec.passes.casts.blocks import store_in_blocks
from fxprec.passes.forms.stage import Stage
from fxprec.plan.rows import Site


@dataclass(frozen=True)
class Blocks(Form):
    """A copy in a block format that all its readers tolerate. No other value is recomputed from the copy."""

    format: BlockFormat
    row_format: Format
    """The format in the value's row of the plan, whose ``saved_as`` names the block format."""

    serves = frozenset({Demand.READ, Demand.READ_LOW})
    counted = "in blocks"
    options = frozenset({"blocks"})
    kernel = Kind.EXTERN

    @property
    def error(self) -> float:
        return rounding_error(self.format)

    @property
    def is_random(self) -> bool:  # type: ignore[override]
        """Return whether the copy is rounded at random."""
        return self.format.bits < WHOLE_BITS

    def store(self, value: Node, stage: Stage) -> None:
        seed = stage.seed if self.is_random else None
        (q,) = stage.casts.pop(value)
        store_in_blocks(stage.graph, q, self.format, seed)

    def plan_row(self, site: Site, value: Node, stage: Stage) -> Site:
        return replace(row_of(site, "narrow", self.row_format.name, ""), saved_as=self.format.name)

    def matches_row(self, site: Site) -> bool:
        return site.way == "narrow" and site.saved_as == self.format.name and site.promoted_at is None
