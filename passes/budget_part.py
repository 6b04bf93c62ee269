"""The part of a peak budget that one graph may use, if all graphs of a step share the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """The most bytes that may be live at once, and between the halves, where another graph may run."""

    peak: float
    waiting: float = math.inf

    def less(self, size: float) -> Bound:
        """Return the bound that is left when ``size`` bytes are taken off both limits."""
        return Bound(self.peak - size, self.waiting - size)


@dataclass(frozen=True)
class BudgetPart:
    """One graph's part of the budget; the default is the part of a graph that runs alone."""

    budget: int | None = None
    """The budget of all graphs together in bytes; None: the budget that the user set."""
    beside: int = 0
    """Bytes of other graphs that are live while this graph runs: tensors that wait for backward, and gradients."""
    waiting: float = math.inf
    """The most bytes of this graph that may wait while others run."""
    num_graphs: int = 1
    is_provisional: bool = False
    """Whether graphs follow that are not known yet. Then this graph takes the choice of the least peak."""
    is_cut: bool = False
    """Whether graphs follow that will never be known, because a dump plans the first graph alone."""
    beyond: int = 0
    """Bytes that the compiled graph took beyond the prediction, under an earlier plan."""
    beyond_waiting: int = 0
    wants_curve: bool = False
    """Whether choices for other budgets are computed, too."""

    @property
    def shares(self) -> bool:
        """Return whether other graphs run in the same step."""
        return self.is_provisional or self.num_graphs > 1

    def bound(self, budget: int, reserved: int = 0) -> Bound:
        """Return the bound that a budget leaves for this graph; ``reserved`` bytes of the budget stay free."""
        return Bound(budget - self.beside - self.beyond - reserved, self.waiting - self.beyond_waiting)
