"""Move a value, or its copy, to host memory between forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.fx import Node

from fxprec.numerics.blocks import AnyFormat
from fxprec.passes.analysis.ways import Demand, Form
from fxprec.passes.forms.candidate import Candidate
from fxprec.passes.forms.low import Low
from fxprec.passes.forms.own import Own
from fxprec.passes.forms.stage import Stage
from fxprec.plan.rows import Site

_WHY = "it waits in host memory to meet the peak budget"


@dataclass(frozen=True)
class OnHost(Form):
    """The tensor that ``form`` keeps, moved to host memory in forward, and back before its first reader in backward."""

    form: Own | Low

    counted = "in host memory"
    ways = ("offload",)
    way = "offload"
    missing = "outputs, values of dynamic size and values with gaps in memory stay on the device"
    is_on_host = True

    @classmethod
    def offers(cls, value: Candidate) -> Iterator[Self]:
        """Yield the plain forms of a static, dense value that is not empty, no output, and has at most one copy."""
        val = value.val
        is_fixed = all(isinstance(n, int) for n in (*val.shape, *val.stride())) and val.numel() > 0
        is_one = len(value.casts) <= 1 and not value.is_returned
        if value.work.fits_peak and is_fixed and is_one and torch.empty_like(val).stride() == val.stride():
            yield from map(cls, (*Own.offers(value), *Low.offers(value)))

    @property
    def serves(self) -> frozenset[Demand]:  # type: ignore[override]  # a property, since instances differ
        """Return the demands that the inner form serves."""
        return self.form.serves

    @property
    def error(self) -> float:
        return self.form.error

    @property
    def options(self) -> frozenset[str]:
        return self.form.options | {"offload"}

    @property
    def format(self) -> AnyFormat | None:  # type: ignore[override]
        """Return the format of the inner form."""
        return self.form.format

    def num_bytes(self, val: torch.Tensor) -> int:
        return self.form.num_bytes(val)

    def store(self, value: Node, stage: Stage) -> None:
        if self.format is not None:
            self.form.store(value, stage)

    def plan_row(self, site: Site, value: Node, stage: Stage) -> Site:
        return replace(self.form.plan_row(site, value, stage), way="offload", why=_WHY)

    def matches_row(self, site: Site) -> bool:
        is_low = isinstance(self.form, Low) and site.format == self.form.format.name
        return site.way == "offload" and (is_low or isinstance(self.form, Own))
