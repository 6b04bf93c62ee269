"""The better of two searches: among whole formats alone, and with block formats among the ways.

More ways make a larger problem, of which as long a search sees less: by itself it may end at a worse choice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from fxprec.passes.analysis.peak.choice import Chooser, Fit
from fxprec.passes.analysis.peak.costs import Rates
from fxprec.passes.analysis.peak.curve import curve
from fxprec.passes.analysis.peak.needs import Needs
from fxprec.passes.analysis.peak.part import Bound
from fxprec.passes.analysis.peak.problem import Effort, Problem
from fxprec.passes.analysis.peak.progress import Progress


@dataclass(frozen=True)
class Either:
    """Finds choices; what it finds is never worse than without block formats."""

    plain: Chooser
    blocks: Chooser | None

    @classmethod
    def of(cls, needs: Needs, rates: Rates, allowed: Collection[str], progress: Progress | None = None) -> Either:
        progress = Progress() if progress is None else progress

        def chooser(needs: Needs) -> Chooser:
            return Chooser(Problem(needs, rates, allowed, Effort(progress=progress)))

        return cls(chooser(replace(needs, few={})), chooser(needs) if any(needs.few.values()) else None)

    def within(self, bound: Bound) -> Fit | None:
        """Return a choice within a bound, of the least time found; or None."""
        fit = self.plain.within(bound)
        return fit if self.blocks is None else self.blocks.within(bound, fit)

    def least(self) -> Fit:
        """Return the choice of the least peak that was found."""
        fit = self.plain.least()
        return fit if self.blocks is None else self.blocks.least(fit)

    def curve(self, *, waiting: bool) -> tuple[Fit, ...]:
        """Return choices from the highest peak to the lowest, each of less time than the next."""
        return curve([self.plain, *([] if self.blocks is None else [self.blocks])], waiting=waiting)
