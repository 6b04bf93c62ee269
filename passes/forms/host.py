"""Move a value, or its copy, to host memory between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxprec.numerics.blocks import AnyFormat
from fxprec.passes.analysis.ways import Demand, Form
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
    is_on_host = True

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
