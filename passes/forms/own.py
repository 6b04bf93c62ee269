"""Keep a value in its own dtype, or in 16 bits if its dtype is wider and no reader needs more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch.fx import Node

from fxprec.ir.symbolic import Dequantize
from fxprec.numerics.formats import Format, parse
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.analysis.ways import ANY, Form, row_of
from fxprec.passes.forms.candidate import Candidate
from fxprec.passes.forms.stage import Stage
from fxprec.plan.rows import Site

_WHY = "the peak budget leaves room to keep it"


@dataclass(frozen=True)
class Own(Form):
    """The value itself, or a copy in ``format`` that replaces it."""

    format: Format | None = None

    serves = ANY
    counted = "kept"
    options = frozenset()

    @classmethod
    def offers(cls, value: Candidate) -> Iterator[Self]:
        yield cls(value.own)

    def store(self, value: Node, stage: Stage) -> None:
        if self.format is not None:
            stage.store_copy(value, self.format)
            return
        for q in stage.casts.get(value, ()):
            for x, read in Dequantize.among(list(q.users)):
                x.replace_all_uses_with(stage.as_dtype(value, read.dtype, x))

    def plan_row(self, site: Site, value: Node, stage: Stage) -> Site:
        fmt = self.format or (parse("fp32") if tensor_of(value).dtype == torch.float32 else stage.hi)
        return row_of(site, "keep", fmt.name, _WHY)

    def matches_row(self, site: Site) -> bool:
        return site.way in ("keep", "narrow") or site.promoted_at is not None  # narrow: of a value without a low copy
