"""Predict which loops Inductor fuses: loops over the same elements that share tensors they read or write.

Inductor's scheduler fuses the pair that shares the most bytes, then the next. No path may lead out of a kernel and back
into it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, pairwise

from fxprec.passes.analysis.replay.kernels import Kind
from fxprec.passes.analysis.traffic.nodes import Memory, Read

_MOST_READERS = 24
"""Most readers of one tensor that are compared in all pairs; of more readers only neighbours are compared."""
_SMALL = 4096
"""Loops that share no more than these bytes are not fused."""


@dataclass
class _Group:
    """Loops of one kernel."""

    members: set[int]
    over: int
    """Elements that the kernel iterates over."""
    made: set[int]
    """Numbers of elements that its reductions reduce them to."""


class Kernels:
    """The loops of a lowered half, grouped into kernels."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.loops = [p for p, item in enumerate(memory.items) if item.kind in _LOOPS and memory.is_in_memory(p)]
        self.group = {p: self._alone(p) for p in self.loops}
        self._before = self._ancestors()
        pairs = list(self._pairs())
        while sum(self._join(*pair) for pair in pairs):
            pass  # a fused kernel may fuse with a loop that its parts could not fuse with

    def groups(self) -> list[set[int]]:
        """Return the loops of each kernel, in order."""
        return [g.members for g in {id(g): g for g in self.group.values()}.values()]

    def _alone(self, position: int) -> _Group:
        over, made = self.memory.space(position)
        return _Group({position}, over, {made} if made != over else set())

    def _ancestors(self) -> list[int]:
        """Return for each item a bit set of the kernels' items that must run before it."""
        before: list[int] = []
        for item in self.memory.items:
            bits = 0
            for source in item.reads:
                runs = source in self.group or self.memory.items[source].kind is Kind.EXTERN
                bits |= before[source] | (1 << source if runs else 0)
            before.append(bits)
        return before

    def _maker(self, base: int) -> int:
        """Return the item whose loop writes ``base``; a loop may write several results."""
        item = self.memory.items[base]
        return item.reads[0] if item.kind is Kind.PIECE else base

    def _pairs(self) -> Iterator[tuple[int, int, bool]]:
        """Yield (loop, loop, whether the second reads the first), in order of shared bytes, most first."""
        shared: dict[tuple[int, int], int] = {}
        direct: dict[tuple[int, int], bool] = {}
        readers: dict[int, list[tuple[int, Read]]] = {}
        for position in self.loops:
            for read in self.memory.reads[position].values():
                readers.setdefault(read.base, []).append((position, read))
        for base, found in readers.items():
            for position, read in found:
                maker = self._maker(base)
                if maker in self.group and position != maker:
                    pair = maker, position
                    shared[pair] = shared.get(pair, 0) + read.bytes
                    direct[pair] = direct.get(pair, True) and not read.is_moved
            self._beside(found, shared)
        for pair in sorted(shared, key=lambda p: (-shared[p], p)):
            if pair in direct or shared[pair] > _SMALL:
                yield *pair, direct.get(pair, True)

    def _beside(self, found: Sequence[tuple[int, Read]], shared: dict[tuple[int, int], int]) -> None:
        near = combinations(found, 2) if len(found) <= _MOST_READERS else pairwise(found)
        for (a, read_a), (b, read_b) in near:
            if a != b and read_a.piece == read_b.piece:
                pair = min(a, b), max(a, b)
                shared[pair] = shared.get(pair, 0) + min(read_a.bytes, read_b.bytes)

    def _join(self, first: int, second: int, direct: bool) -> bool:
        """Fuse the kernels of two loops if one kernel can do both; return whether it can."""
        a, b = self.group[first], self.group[second]
        if a is b or not direct or not self._fit(a, b) or self._has_cycle(a, b):
            return False
        joined = _Group(a.members | b.members, max(a.over, b.over), a.made | b.made)
        joined.made.discard(joined.over)
        for member in joined.members:
            self.group[member] = joined
        self._note(joined)
        return True

    def _fit(self, a: _Group, b: _Group) -> bool:
        """Return whether one kernel can do both; ``b`` may read ``a``'s results."""
        reads = (read for p in b.members for read in self.memory.reads[p].values())
        reads_first = any(self._maker(read.base) in a.members for read in reads)
        if reads_first and any(self.memory.is_split(p) for p in a.members):
            return False
        if a.over != b.over:
            wide, narrow = (a, b) if a.over > b.over else (b, a)
            return not narrow.made and narrow.over in wide.made
        if not (a.made <= b.made or b.made <= a.made):
            return not reads_first and self._can_mix(a, b)
        return self._is_cut(a) == self._is_cut(b) or len(a.made | b.made) > 1

    def _is_cut(self, group: _Group) -> bool:
        """Return whether a kernel is the first of a reduction's two kernels."""
        return any(self.memory.is_split(p) for p in group.members)

    def _can_mix(self, a: _Group, b: _Group) -> bool:
        """Return whether one kernel can reduce rows and columns of a matrix: Inductor's `MixOrderReduction`."""
        rows, columns = (b, a) if self._is_cut(a) else (a, b)
        if self._is_cut(rows) or len(rows.made) > 1 or len(columns.made) > 1:
            return False
        (count,) = rows.made
        length = rows.over // count
        sums = all("sum" in str(self.memory.nodes[p].target) for p in columns.members if self.memory.is_split(p))
        return sums and rows.over >= 5 << 20 and count >= max(4096, 2 * length) and length <= 1 << 14

    def _has_cycle(self, a: _Group, b: _Group) -> bool:
        """Return whether a kernel outside reads one of the groups and is read by the other."""
        members = a.members | b.members
        bits, before = _bits(members), self._before_any(members)
        return any(self._before[p] & bits for p in _set_bits(before & ~bits & -(1 << min(members))))

    def _before_any(self, members: set[int]) -> int:
        return reduce(operator.or_, (self._before[member] for member in members))

    def _note(self, joined: _Group) -> None:
        """Order a fused kernel: nodes before one member are before all members, and before nodes that follow any."""
        bits = _bits(joined.members)
        before = self._before_any(joined.members) & ~bits
        for member in joined.members:
            self._before[member] = before | bits & ~(1 << member)
        for position in range(min(joined.members), len(self._before)):
            if self._before[position] & bits and position not in joined.members:
                self._before[position] |= before | bits


_LOOPS = (Kind.FUSED, Kind.REDUCED)


def _bits(positions: set[int]) -> int:
    return sum(1 << position for position in positions)


def _set_bits(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
