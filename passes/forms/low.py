"""Keep a copy in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from torch.fx import Node

from fxprec.numerics.formats import Format
from fxprec.passes.analysis.ways import LOW, Form, rounding_error, row_of
from fxprec.passes.forms.candidate import Candidate
from fxprec.passes.forms.stage import Stage
from fxprec.plan.rows import Site


@dataclass(frozen=True)
class Low(Form):
    """A copy in the low format of the recipe."""

    format: Format

    serves = LOW
    counted = "kept in 8 bits"
    options = frozenset({"narrow"})

    @classmethod
    def offers(cls, value: Candidate) -> Iterator[Self]:
        if value.low is not None:
            yield cls(value.low)

    @property
    def error(self) -> float:
        return rounding_error(self.format)

    def store(self, value: Node, stage: Stage) -> None:
        stage.store_copy(value, self.format)

    def plan_row(self, site: Site, value: Node, stage: Stage) -> Site:
        return row_of(site, "narrow", self.format.name, stage.needs.why_refused(value))

    def matches_row(self, site: Site) -> bool:
        return site.way == "narrow" and site.has_codes and site.promoted_at is None
