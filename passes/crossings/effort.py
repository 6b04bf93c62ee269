"""Count the work of searches, and stop it at a bound."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxprec.passes.crossings.progress import Progress

_EFFORT = 3_000  # columns of all searches that answer one question
_REPLAYED = 200_000  # items of all choices that are replayed to lower a peak
_NEARBY = 100_000  # columns of all small steps from a choice to a better one


@dataclass
class Effort:
    """The work that a search may still do. Work is counted, not timed, so that every process finds the same choice."""

    columns: int = _EFFORT
    items: int = _REPLAYED
    nearby: int = _NEARBY
    searches: int = 0
    """Calls of HiGHS with integer variables since the problem was made."""
    nodes: int = 0

    progress: Progress = field(default_factory=Progress)

    def renew(self) -> None:
        """Allow as much search and as many replays as at the start."""
        self.columns = _EFFORT
        self.items = _REPLAYED
        self.nearby = _NEARBY

    def searched(self, nodes: int) -> None:
        """Count one search of ``nodes`` branch-and-bound nodes, and show the counts."""
        self.searches += 1
        self.nodes += nodes
        self.progress.show(f"planning what is kept for backward: search {self.searches}, {self.nodes} nodes")

    def take_replay(self, items: int) -> bool:
        """Subtract a replay of ``items`` from the allowance; return whether it may run."""
        self.items -= items
        return self.items >= 0

    def take_step(self, columns: int) -> bool:
        """Subtract a step from a choice to a better one from the allowance; return whether it may be searched."""
        self.nearby -= columns
        return self.nearby >= 0

    def take_search(self, columns: int) -> bool:
        """Subtract a search of ``columns`` from the allowance, or return False if the search is too large."""
        if columns > self.columns:
            return False
        self.columns -= columns
        return True
