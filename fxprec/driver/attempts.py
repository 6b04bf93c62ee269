"""Check ``activation_budget`` and ``peak_budget`` against compiled code, for one graph.

A plan predicts the bytes that it saves and its peak. The partitioned graph and the compiled halves show the real
numbers. If a real number is above the budget, another plan is made with a tighter bound. If no plan is within the
budget, the `BudgetError` names a larger budget as enough. The graph is compiled within that one before, because the
code may hold more than its plan predicts. The code is not run; Inductor's cache keeps it for the run that is given the
budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fxprec.config import Settings
from fxprec.config.settings import PeakBudget
from fxprec.driver.compiled import CodePeak
from fxprec.driver.event_log import EventLog
from fxprec.driver.lowering import Lowering
from fxprec.driver.progress import say
from fxprec.errors import BudgetError
from fxprec.passes.budget_part import BudgetPart
from fxprec.passes.crossings.reserve import enough_for
from fxprec.passes.notice import budget_text, hold_less, readable
from fxprec.plan import PeakBytes, Plan
from fxprec.plan.rows import LIVE
from fxprec.runtime.stats import StatsQueue

if TYPE_CHECKING:
    from fxprec.driver.compilation import Compiler

ATTEMPTS = 5  # plans made for one peak budget, each compiled; the second nearly always fits
_SLACK = 0.02  # share of an activation budget by which a plan may overpredict without another attempt
SAVED_ATTEMPTS = 4  # plans made for one activation budget; the first shows what is saved besides, so the second fits
_TRIALS = 6
_TRIALS_ON_GPU = 2  # a graph compiles for minutes there; what was planned and allocated differed by 0.5 % at most
_EXACT = 3  # trials of what the trial before says; later ones add a share to it
_SHARE = 0.01


class SavedAttempts:
    """The activation budget of one graph, and the bytes that its plans really saved."""

    def __init__(self, settings: Settings, log: EventLog) -> None:
        self.settings, self.log = settings, log
        self.fixed = 0  # bytes saved beyond the prediction for the counted tensors
        self._saved: list[int] = []  # bytes, of each plan above the budget
        self._corrections = 4  # attempts left for plans that are within the budget but predicted too much
        self._told = 0  # bytes last reported for a given or promoted plan above the budget

    def hold(self, predicted: int, saved: int) -> bool:
        """Return whether ``saved`` bytes are accepted; if not, add the difference to the prediction to ``fixed``.

        A plan that predicted too much makes more tensors low than necessary, so four such plans are refused too. Raises
        `BudgetError` if a plan saves no less than an earlier one, or if `SAVED_ATTEMPTS` plans were above the budget.
        """
        budget = self.settings.activation_budget
        if budget is None:
            return True
        if saved <= budget:
            is_exact = not self._corrections or predicted <= saved + _SLACK * budget
            if not is_exact:
                self._corrections -= 1
                self.fixed += saved - predicted
            return is_exact
        self._corrections = 0
        if len(self._saved) + 1 == SAVED_ATTEMPTS or any(saved >= before for before in self._saved):
            from fxprec.passes.analysis.assignment import over_budget

            raise over_budget(self.settings, min(*self._saved, saved))
        self._saved.append(saved)
        self.fixed += saved - predicted
        return False

    def tell(self, saved: int, step: int) -> None:
        """Warn if a given or promoted plan saves more than the budget; such a plan takes precedence over the budget."""
        budget = self.settings.activation_budget
        if budget is None or saved <= max(budget, self._told):
            return
        self._told = saved
        detail = (
            f"{readable(saved)} are saved for backward: tensors were promoted, or the given plan saves more than the "
            "budget"
        )
        self.log.warn(f"activation_budget {readable(budget)}: {detail}")
        self.log.note("fallback", self.log.name, detail, step=step)


class PeakAttempts:
    """The peak budget of one graph, and the peaks of its plans as compiled."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.part = BudgetPart()
        self.tried: list[tuple[int, int]] = []
        """For each plan made for the budget: its predicted peak and its peak as compiled, in bytes."""
        self._told = 0  # bytes last reported for a given or promoted plan above the budget

    def set_part(self, part: BudgetPart) -> None:
        """Set the part of the budget that later plans are made for."""
        self.part, self.tried = part, []

    def judged(self, plan: Plan, found: CodePeak, *, is_given: bool, step: int) -> Plan | None:
        """Return the plan with the peak of its code; None to plan again. Raises `BudgetError` as `hold` does."""
        if found.bytes is None or plan.peak_bytes is None:
            unread = f"peak budget: the predicted peak was not compared with the compiled code: {found.unread}"
            return replace(plan, notes=(*plan.notes, unread)) if found.unread else plan
        peak = (
            self.tell(plan.peak_bytes, found.bytes, step)
            if is_given
            else self.hold(plan.peak_bytes, found.bytes, found.waiting)
        )
        return None if peak is None else replace(plan, peak_bytes=replace(peak, compiled_live=found.live))

    def hold(self, planned: PeakBytes, held: int, waiting: int) -> PeakBytes | None:
        """Return ``planned`` with the compiled peak and the bytes live between the halves; None to plan again.

        Raises `BudgetError` if `ATTEMPTS` plans were above the budget.
        """
        self.tried.append((planned.planned, held))
        is_within = held <= planned.room and waiting <= self.part.waiting
        if is_within or self.part.is_provisional:
            return replace(planned, compiled=held, waiting=waiting)
        least = min(held for _, held in self.tried)
        if len(self.tried) == ATTEMPTS:
            beside = f", {readable(planned.beside)} of it for other graphs" if planned.beside else ""
            beside += f", {readable(planned.reserved)} of it for libraries" if planned.reserved else ""
            wanted = least + planned.beside
            if planned.reserved:
                wanted = enough_for(least - planned.room, planned.budget)
            high = 0 if planned.graphs > 1 or planned.reserved else planned.high
            asked = f"{readable(planned.budget)}{beside}"
            found = f"the best of {ATTEMPTS} plans holds {readable(least)} as compiled"
            gradients = max(planned.live, key=sum)[LIVE.index("gradients returned")] if planned.live else 0
            ways = [hold_less(gradients, planned.planned)]
            raise BudgetError.of_peak(asked, found, wanted, f"to {budget_text(wanted, high)}", ways, high=high)
        assert planned.waiting is not None
        part = self.part
        if held > planned.room:
            part = replace(part, beyond=part.beyond + held - planned.planned)
        if waiting > part.waiting:
            part = replace(part, beyond_waiting=part.beyond_waiting + waiting - planned.waiting)
        self.part = part
        detail = f"a plan that predicts {readable(planned.planned)} at the peak holds {readable(held)} as compiled"
        self.log.note("replanned", self.log.name, f"{detail}; planned again within {readable(planned.room)}")
        return None

    def tell(self, planned: PeakBytes, held: int, step: int) -> PeakBytes:
        """Warn if a given or promoted plan exceeds the budget; such a plan takes precedence. Return it as compiled."""
        if held > max(planned.room, self._told):
            self._told = held
            detail = (
                f"the step holds {readable(held)}: tensors were promoted, or the given plan holds more than the budget"
            )
            self.log.warn(f"peak_budget {readable(planned.budget)}: {detail}")
            self.log.note("fallback", self.log.name, detail, step=step)
        return replace(planned, compiled=held)


class _QuietLog(EventLog):
    """A log of what nobody runs."""

    def warn(self, message: str) -> None:
        """Do nothing."""


def can_confirm(compiler: Compiler, error: BudgetError) -> bool:
    """Return whether compiling shows if the budget that ``error`` names is enough."""
    lowering = compiler.lowering
    is_measured = lowering.name != "eager" and not lowering.is_interpreted and not compiler.plans_only
    return bool(error.enough) and compiler.confirms and is_measured and not compiler.peak.part.shares


def confirmed(error: BudgetError, compiler: Compiler, compile_graph: Callable[[Compiler], object]) -> BudgetError:
    """Return the error with a budget within which ``compile_graph`` succeeds; as it is if compiling fails otherwise."""
    wanted = error.enough
    say(f"peak_budget {error.asked} is out of reach; compiling within {readable(wanted)} to see if that is enough")
    for trial in range(_TRIALS if compiler.lowering.device.type == "cpu" else _TRIALS_ON_GPU):
        try:
            compile_graph(_within(compiler, wanted))
        except BudgetError as again:
            more = int(_SHARE * wanted) if trial >= _EXACT else 1
            wanted = max(again.enough, wanted + more)
        except Exception:  # what it is shows when the budget is given
            return error
        else:
            break
    return error if wanted == error.enough else _naming(error, wanted)


def _within(compiler: Compiler, budget: int) -> Compiler:
    """Return a compiler for another peak budget that changes nothing of the given one's."""
    log, asked = _QuietLog(compiler.log.name, strict=False), compiler.settings.peak_budget
    in_bytes = asked is not None and asked.has_libraries and not asked.is_share
    settings = replace(compiler.settings, peak_budget=PeakBudget(budget, has_libraries=in_bytes))
    return replace(
        compiler,
        settings=settings,
        lowering=Lowering(settings.asked, compiler.lowering.device, log.notice),
        budget=SavedAttempts(settings, log),
        peak=PeakAttempts(log),
        log=log,
        tried=[],
        queue=StatsQueue(),
        dump=None,
        recorder=None,
        tensors=None,
        numerics=None,
        memory=None,
        updates=compiler.updates if compiler.recorder is None else None,
        confirms=False,
    )


def _naming(error: BudgetError, wanted: int) -> BudgetError:
    found, said = f"{error.found}, and {readable(wanted)} as compiled", f"to {budget_text(wanted, error.high)}"
    return BudgetError.of_peak(error.asked, found, wanted, said, error.ways, high=error.high)
