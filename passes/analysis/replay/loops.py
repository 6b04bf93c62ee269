"""Predict which pointwise results are written to memory, and what each loop reads there, as Inductor fuses.

A pointwise result is computed in the loops of its readers. It is written to memory only if a library's kernel reads it,
or if several loops read it and repeating it is expensive (`realize_reads_threshold` and its kin).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


class Loops:
    """Which items are written to memory (``in_memory``), and which of these each item reads (``reads``)."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.readers: list[list[int]] = [[] for _ in items]
        for position, item in enumerate(items):
            for read in item.reads:
                self.readers[read].append(position)
        self.returned = self._shown_to_the_end()
        self.in_memory = self._find_in_memory()
        self.reads = self._reads(self.in_memory)

    def _find_in_memory(self) -> list[bool]:
        """Return for each item whether it is written to memory."""
        wanted, users = self._wanted_in_memory(), self._users()
        in_memory, operations = [False] * len(self.items), [0] * len(self.items)
        heavy = [item.is_heavy for item in self.items]
        reads: list[set[int]] = []
        for position, item in enumerate(self.items):
            reads.append(set())
            for read in item.reads:
                is_memory = in_memory[read] or self.items[read].kind is Kind.FREE
                reads[position] |= {read} if is_memory else reads[read]
                operations[position] += 0 if is_memory else operations[read]
                heavy[position] |= not is_memory and heavy[read]
            operations[position] += item.kind is Kind.FUSED
            is_much = len(reads[position]) > _MANY_READS or operations[position] > _MANY_OPERATIONS or heavy[position]
            is_apart = wanted[position] or item.is_stored or (users[position] > 1 and is_much)
            in_memory[position] = item.kind in _ALWAYS or (item.kind is Kind.FUSED and is_apart)
        return in_memory

    def _wanted_in_memory(self) -> list[bool]:
        """Return for each item whether a library's kernel or the user reads it from memory, seen through views."""
        wanted = list(self.returned)
        for position in reversed(range(len(self.items))):
            is_memory = self.items[position].kind is Kind.EXTERN
            is_view = self.items[position].kind is Kind.VIEW and wanted[position]
            if is_memory or is_view:
                for read in self.items[position].reads:
                    wanted[read] = True
        return wanted

    def _shown_to_the_end(self) -> list[bool]:
        """Return for each item whether it, or a view of it, is returned."""
        returned = [item.is_returned for item in self.items]
        for position in reversed(range(len(self.items))):
            if returned[position] and self.items[position].kind is Kind.VIEW:
                for read in self.items[position].reads:
                    returned[read] = True
        return returned

    def _users(self) -> list[int]:
        users = [len(readers) for readers in self.readers]
        for position in reversed(range(len(self.items))):
            readers = self.readers[position]
            users[position] = sum(users[r] if self.items[r].kind is Kind.VIEW else 1 for r in readers)
        return users

    def _reads(self, in_memory: Sequence[bool]) -> list[set[int]]:
        """Return for each item the items that it reads from memory, through views and nodes of its own loop."""
        reads: list[set[int]] = []
        for item in self.items:
            reads.append(set())
            for read in item.reads:
                reads[-1] |= {read} if in_memory[read] else reads[read]
        return reads
