"""The graph of scales as plain data: power-of-two exponents of gradients, and of stored copies of forward tensors.

Definitions: docs/algorithms.md, "Gradient scaling" and "Scales of copies". The passes carry-scales and scale-copies
extract this graph from the joint graph once. The runtime chooses the exponents and writes them into the scale table.
A *variable* is the exponent ``a`` of a gradient ``g`` that is stored as ``2**a * g``. Variables form a small DAG. A
copy's exponent is independent: the cast multiplies the copy by its scale, and each reader divides by the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

Producer: TypeAlias = Literal["gemm", "softmax", "other"]
DOWN_EXP = 3
"""Binades by which a copy with outliers is scaled down: e4m3fn's normal numbers then reach from 0.125 to 3,584."""


@dataclass(frozen=True, slots=True)
class GradientGemm:
    """The GEMM dX = f(dY, W) that produced a gradient, with the facts that Theorem 1 needs."""

    length: int
    """Accumulation length N."""
    gradient: int
    """Row of the scale table for dY."""
    operand: int
    """Row of the scale table for W, the other operand."""


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast of a gradient to its format, with its own scale."""

    row: int
    """The cast's row of the scale table."""
    site: int
    """Id of the site; a site with several casts (``simulate``: one per consumer) has several rows."""
    format: str
    source: int | None
    """Variable of the incoming gradient's scale; None for a gradient without a scale."""
    producer: Producer = "other"
    gemm: GradientGemm | None = None
    factor: int = 0
    """log2 of the gradient's size relative to the graph's tangents, estimated from constants and sums; for example -13
    behind a mean over 8,192 elements. The first scale is chosen from this estimate."""


@dataclass(frozen=True, slots=True)
class Join:
    """A sum of gradients, whose summands must have one common scale."""

    parts: tuple[int | None, ...]
    """Variables of the summands, two or more; None for a summand without a scale."""

    def __post_init__(self) -> None:
        assert len(set(self.parts)) > 1, "gradients that agree already need no join"


@dataclass(frozen=True, slots=True)
class Copy:
    """A forward tensor that is stored in few bits with its own scale."""

    row: int
    """The copy's row of the scale table, which is its site's id."""
    format: str


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of the scale table without a cast: its exponent is that of ``plus`` minus that of ``minus``; None is 0."""

    row: int
    plus: int | None
    minus: int | None
    plus_copy: int | None = None
    """Row of a copy whose exponent is added."""
    minus_copy: int | None = None
    """Row of a copy whose exponent is subtracted."""


@dataclass(frozen=True)
class ScaleGraph:
    """Variables in topological order, the rows of the table that are derived from variables, and scaled copies."""

    variables: tuple[Cast | Join, ...] = ()
    slots: tuple[Slot, ...] = ()
    copies: tuple[Copy, ...] = ()

    def __post_init__(self) -> None:
        for i, variable in enumerate(self.variables):
            before = (variable.source,) if isinstance(variable, Cast) else variable.parts
            assert all(v is None or 0 <= v < i for v in before), "a variable stands behind what it is made of"

    @cached_property
    def casts(self) -> Mapping[int, int]:
        """The variable of each cast, by row."""
        return {v.row: i for i, v in enumerate(self.variables) if isinstance(v, Cast)}

    def casts_alike(self, other: ScaleGraph) -> bool:
        """Return whether the variables of both graphs are the same casts and joins, so that exponents can be reused."""
        ours, theirs = ([_place(v) for v in graph.variables] for graph in (self, other))
        return ours == theirs

    @cached_property
    def operands(self) -> frozenset[int]:
        """The rows of forward tensors whose statistics Theorem 1 needs."""
        return frozenset(v.gemm.operand for v in self.variables if isinstance(v, Cast) and v.gemm is not None)

    @cached_property
    def noted(self) -> frozenset[int]:
        """The rows whose statistics decide scales."""
        return self.operands.union(self.casts)

    @cached_property
    def rows(self) -> frozenset[int]:
        """The rows whose scale exponent may differ from 0."""
        return frozenset(self.casts) | {slot.row for slot in self.slots} | self.copied

    @cached_property
    def copied(self) -> frozenset[int]:
        """The rows of copies with a scale."""
        return frozenset(copy.row for copy in self.copies)

    def num_rows(self, sites: int) -> int:
        """Return the number of rows that the table of a plan with ``sites`` sites needs."""
        return max([sites, *(row + 1 for row in self.rows)])

    @cached_property
    def site_of(self) -> Mapping[int, int]:
        """The site of each cast, by row; some rows are beyond the sites' own."""
        return {v.row: v.site for v in self.variables if isinstance(v, Cast)}


def _place(variable: Cast | Join) -> tuple[int, int, str] | tuple[int | None, ...]:
    """Return the cast or join that a variable stands for, without the gradient's producer."""
    return (variable.row, variable.site, variable.format) if isinstance(variable, Cast) else variable.parts
