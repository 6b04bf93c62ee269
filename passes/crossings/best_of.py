"""Take the best of several searches: with and without block formats, with copies to host memory hidden and exposed.

Block formats enlarge the search space, so within the same node limit the solver may return a worse choice. Whether a
copy is hidden behind kernels depends on all other copies. So one search assumes that all copies are hidden, and another
that none is; `overlap` then replays the result.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import MappingProxyType

from fxprec.passes.budget_part import Bound
from fxprec.passes.crossings.choice import Chooser
from fxprec.passes.crossings.costs import Rates
from fxprec.passes.crossings.curve import curve
from fxprec.passes.crossings.effort import Effort
from fxprec.passes.crossings.moments import Fit
from fxprec.passes.crossings.needs import Needs
from fxprec.passes.crossings.overlap import overlapped
from fxprec.passes.crossings.problem import Problem, Ways
from fxprec.passes.crossings.progress import Progress


@dataclass(frozen=True)
class BestOf:
    """Choosers whose best result is never worse than the result without block formats."""

    plain: Chooser
    blocks: Chooser | None
    hidden: Chooser | None = None
    """A chooser that assumes that all copies to host memory are hidden."""

    @classmethod
    def of(
        cls,
        needs: Needs,
        rates: Rates,
        allowed: Collection[str],
        progress: Progress | None = None,
        start: Ways = MappingProxyType({}),
    ) -> BestOf:
        """Build choosers for the forms that ``needs`` offers and ``allowed`` permits; ``rates`` give the costs.

        ``start``: a choice to begin from, besides those that the searches find.
        """
        progress = Progress() if progress is None else progress

        def chooser(*more: str, hides_copies: bool = False) -> Chooser:
            return Chooser(Problem(needs, rates, (*allowed, *more), hides_copies, Effort(progress=progress)), start)

        offered = [form for forms in needs.forms.values() for form in forms]
        has_blocks = any("blocks" in form.options for form in offered)
        moves = "offload" in allowed and any(form.is_on_host for form in offered)
        return cls(
            chooser(),
            chooser("blocks") if has_blocks else None,
            chooser("blocks", hides_copies=True) if moves else None,
        )

    def unchanged(self, bound: Bound) -> Fit | None:
        """Return the choice to begin from, if it is within the bound: the budget then changes nothing."""
        return next((fit for fit in self.plain.started if fit.excess(bound) <= 0), None)

    def within(self, bound: Bound) -> Fit | None:
        """Return the fastest choice found within a bound, or None."""
        fit = self.plain.within(bound)
        if self.blocks is not None:
            fit = self.blocks.within(bound, fit)
        found = [] if fit is None else [overlapped(fit, self.plain.problem, bound.peak)]
        if self.hidden is not None and (other := self.hidden.within(bound)) is not None:
            found.append(overlapped(other, self.hidden.problem, bound.peak))
        return min(found, key=lambda fit: fit.seconds, default=None)

    def least(self) -> Fit:
        """Return the choice with the least peak that was found."""
        fit = self.plain.least()
        fit = fit if self.blocks is None else self.blocks.least(fit)
        return overlapped(fit, self.plain.problem, fit.peak)

    def curve(self, *, waiting: bool) -> tuple[Fit, ...]:
        """Return choices from the highest peak to the lowest; each takes less time than the next."""
        return curve([c for c in (self.plain, self.blocks, self.hidden) if c is not None], waiting=waiting)
