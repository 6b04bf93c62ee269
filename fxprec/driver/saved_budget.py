"""Holding what a graph really saves for backward to ``activation_budget``: known once the graph is partitioned."""

from __future__ import annotations

from fxprec.config import Settings
from fxprec.passes.analysis.assignment import over_budget

ATTEMPTS = 4  # plans made for one budget; the second nearly always fits, since the first shows what is saved besides


class PlanAgain(Exception):
    """Asks for another plan, with what the last one saved beyond its prediction taken off the budget."""


class SavedBudget:
    """The budget of one graph, and what its plans turned out to save."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.fixed = 0  # bytes beyond what is predicted of the counted tensors
        self._saved: list[int] = []  # by each plan above the budget

    def hold(self, predicted: int, saved: int) -> None:
        """Raise `PlanAgain` where ``saved`` bytes are too many, `BudgetError` where another plan saves no less."""
        budget = self.settings.activation_budget
        if budget is None or saved <= budget:
            return
        if len(self._saved) + 1 == ATTEMPTS or any(saved >= before for before in self._saved):
            raise over_budget(self.settings, min(*self._saved, saved))
        self._saved.append(saved)
        self.fixed += saved - predicted
        raise PlanAgain
