"""Pass 3: which tensors are low; the policies themselves live in `assignment`."""

from __future__ import annotations

from dataclasses import dataclass

from fxprec.passes.assignment import assign
from fxprec.passes.base import Work


@dataclass(frozen=True)
class AssignPrecision:
    """Fill ``work.assignment`` by the configured policy."""

    name: str = "assign-precision"

    def apply(self, work: Work) -> None:
        assert work.grouped is not None
        work.assignment = assign(work.grouped.tensors, work.config)
