"""The part of a budget that one graph may hold, where all graphs of a step share the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """The most bytes that may live at once, and between the halves, where another graph may run."""

    peak: float
    waiting: float = math.inf

    def less(self, size: float) -> Bound:
        """Return the bound that is left when ``size`` bytes are taken off both limits."""
        return Bound(self.peak - size, self.waiting - size)


@dataclass(frozen=True)
class Part:
    """One graph's part; the default is the part of a graph that runs alone."""

    budget: int | None = None
    """The budget of all graphs together; None: the one that was asked for."""
    beside: int = 0
    """Bytes of other graphs that live while this graph runs: tensors that wait for backward, and gradients."""
    waiting: float = math.inf
    """The most bytes of this graph that may wait while others run."""
    num_graphs: int = 1
    is_provisional: bool = False
    """Whether graphs follow that are not known yet: this graph holds as little as it can."""
    is_cut: bool = False
    """Whether graphs follow that are never known: a dump plans the first graph alone."""
    beyond: int = 0
    """Bytes that the compiled graph holds beyond what is predicted, by an earlier plan."""
    beyond_waiting: int = 0
    wants_curve: bool = False
    """Whether other budgets are looked at, too."""

    @property
    def shares(self) -> bool:
        """Whether other graphs run in the same step."""
        return self.is_provisional or self.num_graphs > 1

    def bound(self, budget: int, reserved: int = 0) -> Bound:
        """Return what is left of a budget, of which ``reserved`` bytes stay free."""
        return Bound(budget - self.beside - self.beyond - reserved, self.waiting - self.beyond_waiting)
