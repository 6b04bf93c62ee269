"""The scales of a graph as plain data: power-of-two exponents of gradients, and of stored copies of forward tensors.

Definitions: docs/algorithms.md, "Gradient scaling" and "Scales of copies". The passes carry-scales and scale-copies
extract them from the joint graph once; the runtime chooses the exponents and writes them into the scale table.
A *variable* is the exponent ``a`` of a gradient ``g``, held as ``2**a * g``. Variables form a small DAG. A copy's
exponent stands alone: the copy is written times its scale, and whoever reads it takes the scale off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

Producer: TypeAlias = Literal["gemm", "softmax", "other"]


@dataclass(frozen=True, slots=True)
class GradientGemm:
    """The GEMM dX = f(dY, W) that made a gradient, as Theorem 1 needs it."""

    length: int
    """Accumulation length N."""
    gradient: int
    """Row of the table where dY is stored."""
    operand: int
    """Row of the table where W, the other operand, is stored."""


@dataclass(frozen=True, slots=True)
class Cast:
    """A place where a gradient is narrowed to its format: it gets a scale of its own."""

    row: int
    """Its row of the scale table."""
    site: int
    """Site of the plan; a site with several casts (``simulate``: one per consumer) has several rows."""
    format: str
    source: int | None
    """Variable the incoming gradient carries, None for a gradient without a scale."""
    producer: Producer = "other"
    gemm: GradientGemm | None = None
    factor: int = 0
    """log2 of how much larger it is than the gradients that come into the graph, as far as constants and sums tell: -13
    behind a mean over 8,192 elements. The first scale is chosen by it."""


@dataclass(frozen=True, slots=True)
class Join:
    """A sum of gradients, which must agree on one scale."""

    parts: tuple[int | None, ...]
    """Variables of the summands, two or more; None carries no scale."""

    def __post_init__(self) -> None:
        assert len(set(self.parts)) > 1, "gradients that agree already need no join"


@dataclass(frozen=True, slots=True)
class Copy:
    """A forward tensor that is stored in few bits, with a scale of its own."""

    row: int
    """Its row of the scale table, which is its site's id."""
    format: str


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of the table without a site: its exponent is that of ``plus`` less that of ``minus``; None counts 0."""

    row: int
    plus: int | None
    minus: int | None
    plus_copy: int | None = None
    """Row of a copy whose exponent is added; that of ``minus_copy`` is taken off."""
    minus_copy: int | None = None


@dataclass(frozen=True)
class ScaleGraph:
    """Variables in topological order, the rows of the table that are derived from them, and copies with scales."""

    variables: tuple[Cast | Join, ...] = ()
    slots: tuple[Slot, ...] = ()
    copies: tuple[Copy, ...] = ()

    def __post_init__(self) -> None:
        for i, variable in enumerate(self.variables):
            before = (variable.source,) if isinstance(variable, Cast) else variable.parts
            assert all(v is None or 0 <= v < i for v in before), "a variable stands behind what it is made of"

    @cached_property
    def casts(self) -> Mapping[int, int]:
        """Return the variable of each cast, by row."""
        return {v.row: i for i, v in enumerate(self.variables) if isinstance(v, Cast)}

    def casts_alike(self, other: ScaleGraph) -> bool:
        """Say whether the variables of both stand for the same casts and joins, so that exponents carry over."""
        ours, theirs = ([_place(v) for v in graph.variables] for graph in (self, other))
        return ours == theirs

    @cached_property
    def operands(self) -> frozenset[int]:
        """Return the rows of forward tensors whose statistics Theorem 1 needs."""
        return frozenset(v.gemm.operand for v in self.variables if isinstance(v, Cast) and v.gemm is not None)

    @cached_property
    def noted(self) -> frozenset[int]:
        """Return the rows whose statistics decide scales."""
        return self.operands.union(self.casts)

    @cached_property
    def rows(self) -> frozenset[int]:
        """Return the rows whose scale exponent may differ from 0."""
        return frozenset(self.casts) | {slot.row for slot in self.slots} | self.copied

    @cached_property
    def copied(self) -> frozenset[int]:
        """Return the rows of copies with a scale."""
        return frozenset(copy.row for copy in self.copies)

    def num_rows(self, sites: int) -> int:
        """Return the rows a table with ``sites`` sites needs."""
        return max([sites, *(row + 1 for row in self.rows)])

    @cached_property
    def site_of(self) -> Mapping[int, int]:
        """Return the site of each cast's row; some rows lie beyond those of the sites."""
        return {v.row: v.site for v in self.variables if isinstance(v, Cast)}


def _place(variable: Cast | Join) -> tuple[int, int, str] | tuple[int | None, ...]:
    """Return what a variable stands for, whatever made the gradient."""
    return (variable.row, variable.site, variable.format) if isinstance(variable, Cast) else variable.parts
