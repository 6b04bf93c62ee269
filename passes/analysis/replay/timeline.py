"""Compute the live bytes of a step over time, from the order of its kernels.

A tensor in memory (`loops`) is live from the node that writes it to the last node that reads its memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from fxprec.passes.analysis.kernel_order import Kernel, better_order
from fxprec.passes.analysis.replay.kernels import Kind
from fxprec.passes.analysis.replay.loops import Item, Loops


@dataclass
class Timeline:
    """The live tensors at each time. Kernels run in an order that saves memory, forward's kernels first.

    Backward's items begin at ``border``. A time is a kernel's place in the order; an item inside other loops has none.
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
        loops = Loops(self.items)
        self._loops, self._returned, self._in_memory = loops, loops.returned, loops.in_memory
        self._aligned = loops.aligned_reads()
        reads = loops.reads
        pieces = {p: item.reads[0] for p, item in enumerate(self.items) if item.kind is Kind.PIECE and item.reads}
        run = [p for p, is_in_memory in enumerate(self._in_memory) if is_in_memory and p not in pieces]
        self._made_by = {p: [p] for p in run}
        """The items that each item's kernel writes: one kernel writes all pieces of its result."""
        for piece, maker in pieces.items():
            if maker in self._made_by:
                self._made_by[maker].append(piece)
        self.split = bisect_left(run, self.border)
        halves = run[: self.split], run[self.split :]
        kept = {p for p in halves[0] if self.items[p].is_stored or self._returned[p]}
        self.order = [*self._ordered(halves[0], reads, kept), *self._ordered(halves[1], reads, set())]
        self._fill(reads)

    def _ordered(self, half: Sequence[int], reads: Sequence[Collection[int]], kept: Collection[int]) -> list[int]:
        at = {made: i for i, position in enumerate(half) for made in self._made_by[position]}
        returned = {p for p in at if self._returned[p]} | {*kept}
        size = [item.bytes for item in self.items]
        kernels = [
            Kernel(
                {m: size[m] for m in self._made_by[p]},
                {r: size[r] for r in reads[p]},
                frozenset(at[r] for r in (*reads[p], *self._overwrites(p)) if r in at),
                self.items[p].workspace,
                frozenset(r for r in self._over(p) if r in at),
            )
            for p in half
        ]
        order = better_order(kernels, returned)
        return list(half) if order is None else [half[i] for i in order]

    def _over(self, position: int) -> Iterator[int]:
        """Yield the tensors over which a loop may write its result, if nothing reads them later."""
        item = self.items[position]
        if item.kind is Kind.FUSED:
            for read in sorted(self._aligned[position]):
                over = self.items[read]
                is_its_own = bool(over.reads) and not over.is_stored and not self._returned[read]
                if is_its_own and over.bytes == item.bytes:
                    yield read

    def _overwrites(self, position: int) -> set[int]:
        """Return the kernels that read the tensor that an item overwrites, through views and their own loops."""
        written = self.items[position].writes
        if written is None:
            return set()
        found, stack = set[int](), [*self._loops.readers[written]]
        while stack:
            reader = stack.pop()
            if self._in_memory[reader]:
                found.add(reader)
            else:
                stack += self._loops.readers[reader]
        return found - {position}

    def _fill(self, reads: Sequence[Collection[int]]) -> None:
        end = len(self.order)
        time = {made: t for t, position in enumerate(self.order) for made in self._made_by[position]}
        last = dict(time)
        for position, t in time.items():
            for read in reads[position]:
                last[read] = max(last[read], t)
        for position, t in time.items():
            in_forward = t < self.split
            ended = (r for r in self._over(position) if last[r] == t > time[r] and (time[r] < self.split) == in_forward)
            if (over := next(ended, None)) is not None:
                last[over] = t - 1
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

    def extend(self, position: int, *, born: int | None = None, dies: int | None = None) -> None:
        """Make an item live from an earlier time on, or until a later time."""
        was = self.born[position], self.dies[position]
        self.born[position] = min(was[0], was[0] if born is None else born)
        self.dies[position] = max(was[1], was[1] if dies is None else dies)
        for time in (*range(self.born[position], was[0]), *range(was[1] + 1, self.dies[position] + 1)):
            self.live[time] += self.items[position].bytes

    def is_returned(self, position: int) -> bool:
        """Return whether an item is live to the end, because it or a view of it is returned."""
        return self._returned[position]

    @property
    def peak(self) -> int:
        """Return the live bytes at the moment with the most; 0 for an empty step."""
        return max(self.live, default=0)

    @property
    def waiting(self) -> int:
        """Return the bytes that are live between forward and backward: saved tensors and outputs."""
        return sum(self.items[i].bytes for i, born in self.born.items() if born < self.split <= self.dies[i])
