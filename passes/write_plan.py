"""Turn what the passes decided into the immutable, serialisable `Plan`."""

from __future__ import annotations

from dataclasses import dataclass

from fxprec.passes.base import Work
from fxprec.plan import Plan


@dataclass(frozen=True)
class WritePlan:
    """Fill ``work.plan``."""

    name: str = "write-plan"

    def apply(self, work: Work) -> None:
        assert work.book is not None
        work.plan = Plan(sites=tuple(work.book.sites))
