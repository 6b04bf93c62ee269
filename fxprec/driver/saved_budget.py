"""Holding what a graph really saves for backward to ``activation_budget``: known once the graph is partitioned."""

from __future__ import annotations

from fxprec.config import Settings
from fxprec.driver.event_log import EventLog
from fxprec.passes.notice import readable

ATTEMPTS = 4  # plans made for one budget; the second nearly always fits, since the first shows what is saved besides


class PlanAgain(Exception):
    """Asks for another plan, with what the last one saved beyond its prediction taken off the budget."""


class SavedBudget:
    """The budget of one graph, and what its plans turned out to save."""

    def __init__(self, settings: Settings, log: EventLog) -> None:
        self.settings, self.log = settings, log
        self.fixed = 0  # bytes beyond what is predicted of the counted tensors
        self._saved: list[int] = []  # by each plan above the budget
        self._told = 0  # bytes above the budget, of a plan that was given

    def hold(self, predicted: int, saved: int) -> None:
        """Raise `PlanAgain` where ``saved`` bytes are too many, `BudgetError` where another plan saves no less."""
        budget = self.settings.activation_budget
        if budget is None or saved <= budget:
            return
        if len(self._saved) + 1 == ATTEMPTS or any(saved >= before for before in self._saved):
            from fxprec.passes.analysis.assignment import over_budget

            raise over_budget(self.settings, min(*self._saved, saved))
        self._saved.append(saved)
        self.fixed += saved - predicted
        raise PlanAgain

    def tell(self, saved: int, step: int) -> None:
        """A plan that was given, or promoted, goes before the budget: it is said, and ends no run."""
        budget = self.settings.activation_budget
        if budget is None or saved <= max(budget, self._told):
            return
        self._told = saved
        detail = f"{readable(saved)} are saved for backward since tensors were promoted, or as the given plan wants"
        self.log.warn(f"activation_budget {readable(budget)}: {detail}")
        self.log.note("fallback", self.log.name, detail, step=step)
