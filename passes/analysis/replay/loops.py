"""Predict which pointwise results are written to memory, and what each loop reads there, as Inductor fuses.

A pointwise result is computed in the loops of its readers. It is written to memory only if a library's kernel reads it,
or if several loops read it and repeating it is expensive (`realize_reads_threshold` and its kin). Inductor decides that
by the number of nodes that read it, before it fuses loops; what a single loop then makes and reads takes no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from fxprec.passes.analysis.replay.kernels import Kind

_ALWAYS = (Kind.REDUCED, Kind.EXTERN, Kind.PIECE)
# Inductor writes a result that several loops read to memory if it has more reads or operations than these.
_MANY_READS, _MANY_OPERATIONS = 4, 30


@dataclass(slots=True)
class Item:
    """One node that runs: its result in bytes and its operands, by position in the step."""

    kind: Kind
    bytes: int
    reads: Sequence[int]
    is_stored: bool = False
    """Whether it is written to memory whoever reads it, because it is saved for backward."""
    is_returned: bool = False
    """Whether it is live to the end of the step: a gradient or an output."""
    is_heavy: bool = False
    """Whether its arithmetic is too expensive to repeat."""
    workspace: int = 0
    """Bytes that its kernel allocates while it runs, beside its result."""
    writes: int | None = None
    """The item that it overwrites, after all other readers of that item."""
    is_aligned: bool = False
    """Whether each of its elements depends on the elements at the same place of what it reads, and on no others."""


class Loops:
    """Which items are written to memory (``in_memory``), and which of these each item reads (``reads``)."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self._kinds = [item.kind for item in items]
        self._views = [p for p, kind in enumerate(self._kinds) if kind is Kind.VIEW]
        self.returned = self._shown_to_the_end()
        self.in_memory = self._without_locals(*self._find_in_memory())
        self.reads = self._reads(self.in_memory)

    def _find_in_memory(self) -> tuple[list[bool], list[bool]]:
        """Return for each item whether it gets a buffer, and whether that is only because repeating it is expensive."""
        wanted, users = self._wanted_in_memory(), self._users()
        is_free, is_fused = ([kind is sought for kind in self._kinds] for sought in (Kind.FREE, Kind.FUSED))
        in_memory, expensive, operations, heavy = list[bool](), list[bool](), list[int](), list[bool]()
        reads: list[frozenset[int]] = []  # what a loop reads, if the item is computed in the loop
        for position, item in enumerate(self.items):
            parts, count, is_heavy = list[frozenset[int]](), int(is_fused[position]), item.is_heavy
            for read in item.reads:
                if in_memory[read] or is_free[read]:
                    parts.append(_alone(read))
                else:
                    parts.append(reads[read])
                    count += operations[read]
                    is_heavy |= heavy[read]
            own = _united(parts)
            reads.append(own)
            operations.append(count)
            heavy.append(is_heavy)
            if is_fused[position]:
                is_much = len(own) > _MANY_READS or count > _MANY_OPERATIONS or is_heavy
                must = wanted[position] or item.is_stored
                expensive.append(not must and users[position] > 1 and is_much)
                in_memory.append(must or expensive[position])
            else:
                expensive.append(False)
                in_memory.append(self._kinds[position] in _ALWAYS)
        return in_memory, expensive

    def _without_locals(self, in_memory: list[bool], expensive: Sequence[bool]) -> list[bool]:
        """Return ``in_memory`` without the items that one loop makes and reads."""
        loops: list[frozenset[int]] = [frozenset()] * len(self.items)  # that read each item, by what they write
        for position in reversed(range(len(self.items))):
            parts = [_alone(r) if in_memory[r] else loops[r] for r in self.readers[position]]
            loops[position] = _united(parts)
            if expensive[position] and len(loops[position]) == 1:
                in_memory[position] = False
        return in_memory

    def aligned_reads(self) -> list[frozenset[int]]:
        """Return for each item what it reads from memory element by element, in the order in which it is written."""
        moved: list[frozenset[int]] = []  # what each item reads from memory in another order
        for position, item in enumerate(self.items):
            if item.is_aligned:
                moved.append(_united([moved[r] for r in item.reads if not self.in_memory[r]]))
            else:
                moved.append(self.reads[position])
        return [reads - others for reads, others in zip(self.reads, moved, strict=True)]

    def _wanted_in_memory(self) -> list[bool]:
        """Return for each item whether a library's kernel or the user reads it from memory, seen through views."""
        wanted = list(self.returned)
        for position in reversed(range(len(self.items))):
            kind = self._kinds[position]
            if kind is Kind.EXTERN or (kind is Kind.VIEW and wanted[position]):
                for read in self.items[position].reads:
                    wanted[read] = True
        return wanted

    def _shown_to_the_end(self) -> list[bool]:
        """Return for each item whether it, or a view of it, is returned."""
        returned = [item.is_returned for item in self.items]
        for position in reversed(self._views):
            if returned[position]:
                for read in self.items[position].reads:
                    returned[read] = True
        return returned

    @cached_property
    def readers(self) -> list[list[int]]:
        """The items that read each item, loops and views included."""
        readers: list[list[int]] = [[] for _ in self.items]
        for position, item in enumerate(self.items):
            for read in item.reads:
                readers[read].append(position)
        return readers

    def _users(self) -> list[int]:
        """Return for each item how many items read it, seen through views."""
        users = [0] * len(self.items)
        for item in self.items:
            for read in item.reads:
                users[read] += 1
        for position in reversed(self._views):  # a view's readers come after it
            for read in self.items[position].reads:
                users[read] += users[position] - 1
        return users

    def _reads(self, in_memory: Sequence[bool]) -> list[frozenset[int]]:
        """Return for each item the items that it reads from memory, through views and nodes of its own loop."""
        reads: list[frozenset[int]] = []
        for item in self.items:
            reads.append(_united([_alone(read) if in_memory[read] else reads[read] for read in item.reads]))
        return reads


@cache
def _alone(position: int) -> frozenset[int]:
    return frozenset((position,))


def _united(parts: Sequence[frozenset[int]]) -> frozenset[int]:
    return parts[0] if len(parts) == 1 else frozenset().union(*parts)
