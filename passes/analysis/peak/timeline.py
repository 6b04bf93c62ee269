"""Live bytes over a step, replayed from the order of its nodes.

What is pointwise is computed in the loops of what reads it, and lies in memory only where a library's kernel reads
it, or where several loops do and it is much to repeat (as Inductor decides, `realize_reads_threshold` and its kin). A
tensor lives from the node that makes it to the last that reads its memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fxprec.passes.analysis.kernel_order import Kernel, peak_bytes, saving_order
from fxprec.passes.analysis.peak.kernels import Kind

_ALWAYS = (Kind.REDUCED, Kind.EXTERN, Kind.PIECE)


# Reads and operations from which Inductor lets a result that several loops read lie in memory; fewer are repeated.
_MANY_READS, _MANY_OPERATIONS = 4, 30


@dataclass(slots=True)
class Item:
    """One node that runs: what it makes and what it reads, by position in the step."""

    kind: Kind
    bytes: int
    reads: Sequence[int]
    is_stored: bool = False
    """Whether it lies in memory whoever reads it: saved for backward."""
    is_returned: bool = False
    """Whether it lives to the end of the step: a gradient, an output."""
    is_heavy: bool = False
    """Whether its arithmetic is too much to repeat."""
    workspace: int = 0
    """Bytes that it takes while it runs, beside its result."""


@dataclass
class Timeline:
    """What lives when: kernels run in an order that saves memory, forward's first, from item ``border`` on backward's.

    A time is a kernel's place in that order; an item that is part of other loops has none.
    """

    items: Sequence[Item]
    border: int
    order: list[int] = field(default_factory=list)
    """The item whose kernel runs at each time."""
    live: list[int] = field(default_factory=list)
    born: dict[int, int] = field(default_factory=dict)
    dies: dict[int, int] = field(default_factory=dict)
    split: int = 0
    """The time at which backward begins."""

    def __post_init__(self) -> None:
        self._readers: list[list[int]] = [[] for _ in self.items]
        for position, item in enumerate(self.items):
            for read in item.reads:
                self._readers[read].append(position)
        self._returned = self._shown_to_the_end()
        lies = self._lying()
        reads = self._reads(lies)
        run = [position for position in range(len(self.items)) if lies[position] and self._maker(position) == position]
        halves = [p for p in run if p < self.border], [p for p in run if p >= self.border]
        kept = {p for p in halves[0] if self.items[p].is_stored or self._returned[p]}
        self.split = len(halves[0])
        self.order = [*self._ordered(halves[0], reads, kept), *self._ordered(halves[1], reads, set())]
        self._fill(reads)

    def _maker(self, position: int) -> int:
        """Return the item whose kernel makes an item's memory: all pieces of one are there at once."""
        item = self.items[position]
        return item.reads[0] if item.kind is Kind.PIECE and item.reads else position

    def _made_by(self, position: int) -> list[int]:
        pieces = (r for r in self._readers[position] if self._maker(r) == position)
        return [position, *pieces]

    def _ordered(self, half: Sequence[int], reads: Sequence[Collection[int]], kept: Collection[int]) -> list[int]:
        at = {made: i for i, position in enumerate(half) for made in self._made_by(position)}
        returned = {p for p in at if self._returned[p]} | {*kept}
        kernels = [
            Kernel(
                {str(m): self.items[m].bytes for m in self._made_by(p)},
                {str(r): self.items[r].bytes for r in reads[p]},
                frozenset(at[r] for r in reads[p] if r in at),
            )
            for p in half
        ]
        order, names = saving_order(kernels), frozenset(map(str, returned))
        is_better = peak_bytes(kernels, order, names) < peak_bytes(kernels, range(len(kernels)), names)
        return [half[i] for i in (order if is_better else range(len(half)))]

    def _lying(self) -> list[bool]:
        """Say of each item whether it lies in memory."""
        wanted, users = self._wanted_in_memory(), self._users()
        lies, operations = [False] * len(self.items), [0] * len(self.items)
        heavy = [item.is_heavy for item in self.items]
        reads: list[set[int]] = []
        for position, item in enumerate(self.items):
            reads.append(set())
            for read in item.reads:
                is_memory = lies[read] or self.items[read].kind is Kind.FREE
                reads[position] |= {read} if is_memory else reads[read]
                operations[position] += 0 if is_memory else operations[read]
                heavy[position] |= not is_memory and heavy[read]
            operations[position] += item.kind is Kind.FUSED
            is_much = len(reads[position]) > _MANY_READS or operations[position] > _MANY_OPERATIONS or heavy[position]
            is_apart = wanted[position] or item.is_stored or (users[position] > 1 and is_much)
            lies[position] = item.kind in _ALWAYS or (item.kind is Kind.FUSED and is_apart)
        return lies

    def _wanted_in_memory(self) -> list[bool]:
        """Say of each item whether what reads it, seen through views, reads memory: a library's kernel, or the user."""
        wanted = list(self._returned)
        for position in reversed(range(len(self.items))):
            is_memory = self.items[position].kind is Kind.EXTERN
            is_view = self.items[position].kind is Kind.VIEW and wanted[position]
            if is_memory or is_view:
                for read in self.items[position].reads:
                    wanted[read] = True
        return wanted

    def _shown_to_the_end(self) -> list[bool]:
        """Say of each item whether it is returned, or a view of it."""
        returned = [item.is_returned for item in self.items]
        for position in reversed(range(len(self.items))):
            if returned[position] and self.items[position].kind is Kind.VIEW:
                for read in self.items[position].reads:
                    returned[read] = True
        return returned

    def _users(self) -> list[int]:
        users = [len(readers) for readers in self._readers]
        for position in reversed(range(len(self.items))):
            behind = self._readers[position]
            users[position] = sum(users[r] if self.items[r].kind is Kind.VIEW else 1 for r in behind)
        return users

    def _reads(self, lies: Sequence[bool]) -> list[set[int]]:
        """Return the items that each reads from memory, through views and what is part of its loop."""
        reads: list[set[int]] = []
        for item in self.items:
            reads.append(set())
            for read in item.reads:
                reads[-1] |= {read} if lies[read] else reads[read]
        return reads

    def _fill(self, reads: Sequence[Collection[int]]) -> None:
        end = len(self.order)
        time = {made: t for t, position in enumerate(self.order) for made in self._made_by(position)}
        last = dict(time)
        for position, t in time.items():
            for read in reads[position]:
                last[read] = max(last[read], t)
        change = [0] * (end + 1)
        for position, t in time.items():
            self.born[position] = t
            self.dies[position] = end - 1 if self._returned[position] else last[position]
            change[t] += self.items[position].bytes
            change[self.dies[position] + 1] -= self.items[position].bytes
        live = 0
        for delta, position in zip(change[:end], self.order, strict=True):
            live += delta
            self.live.append(live + self.items[position].workspace)

    def is_returned(self, position: int) -> bool:
        """Say whether an item lives to the end: it is returned, or a view of it is."""
        return self._returned[position]

    @property
    def peak(self) -> int:
        return max(self.live, default=0)

    @property
    def waiting(self) -> int:
        """What lives between the halves: what is saved, and the outputs."""
        return sum(self.items[i].bytes for i, born in self.born.items() if born < self.split <= self.dies[i])
