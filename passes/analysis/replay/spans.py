"""Find at which times of a replayed step values are computed and read; a loop inside others runs when those run."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from fxprec.passes.analysis.replay.replay import Replay

NEVER = 2**62
"""A time after every step."""


@dataclass(frozen=True)
class Spans:
    """For each item of a replay, the first and the last time at which it is computed: its own, or its readers'."""

    replay: Replay
    begins: list[int]
    ends: list[int]
    first_read: list[int]
    """The first time at which backward reads each item; `NEVER` if it does not."""
    last_read: list[int]
    """The last time at which backward reads each item; -1 if it does not."""
    read_in_forward: list[int]
    """The last time at which forward reads each item; -1 if it does not."""

    @classmethod
    def of(cls, replay: Replay) -> Spans:
        """Find the times of all items of a replay."""
        count = len(replay.items)
        begins, ends, first, last, forward = ([time] * count for time in (NEVER, -1, NEVER, -1, -1))
        for position in reversed(range(count)):
            if (time := replay.timeline.born.get(position)) is not None:
                begins[position] = ends[position] = time
            for source in replay.items[position].reads:
                begins[source] = min(begins[source], begins[position])
                ends[source] = max(ends[source], ends[position])
                if position < replay.border:
                    forward[source] = max(forward[source], forward[position] if time is None else time)
                else:
                    first[source] = min(first[source], begins[position])
                    last[source] = max(last[source], ends[position])
        return cls(replay, begins, ends, first, last, forward)

    def made(self) -> dict[Node, int]:
        """Return when forward computes each of its nodes, or could: as soon as it has the operands."""
        found = dict[Node, int]()
        for node in self.replay.step.forward:
            begins = self.begins[self.replay.at[node]] if node in self.replay.at else NEVER
            ready = max((found[n] for n in node.all_input_nodes if n in found), default=0)
            found[node] = ready if begins == NEVER else begins
        return found

    def last_read_in_forward(self, node: Node) -> int:
        """Return when forward last reads a value; -1: never."""
        return self.read_in_forward[self.replay.at[node]] if node in self.replay.at else -1
