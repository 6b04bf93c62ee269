"""The result of lowering. A start from the cache needs only its plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from fxprec.numerics.formats import Format, parse

if TYPE_CHECKING:
    from torch.fx import Node

    from fxprec.passes.lowering.triton.kernel import Kernel


@dataclass(frozen=True)
class CodedResult:
    """A stored tensor among the results of a lowered graph. Losses are counted from its codes."""

    position: int
    """Position among the results."""
    row: int
    format: str
    table: int
    """Position of the scale table among the inputs."""


@dataclass(frozen=True)
class Incoming:
    """Positions, among the inputs of a backward half that scales, of the scale table and the incoming gradients."""

    table: int
    gradients: tuple[int, ...]


@dataclass(frozen=True)
class Generated:
    """The result of `call_generated`: the kernels, the rows they count for, and the regions without a kernel."""

    kernels: tuple[Kernel, ...] = ()
    watched: tuple[int, ...] = ()
    counters: Node | None = None
    left: tuple[tuple[str, str], ...] = ()
    """Regions left to Inductor: name of the kernel or of the first node, and the reason."""


@dataclass(frozen=True)
class Lowered:
    """The statistics that lowering appended to a graph's outputs, and the kernels it generated."""

    rows: tuple[int, ...]
    """Rows of the statistics, in order. The statistics are one vector for all rows, or one vector per row."""
    counted: tuple[int, ...]
    """Rows of the histograms, which follow the statistics."""
    coded: tuple[CodedResult, ...] = ()
    """Results whose losses are counted from their codes, by the code that runs the graph."""
    generated: Generated = field(default_factory=Generated)
    kernel_names: tuple[str, ...] = ()
    """All generated kernels, block formats' included; for a half from the cache, only these names are known."""

    incoming: Incoming | None = None
    """The incoming gradients and their table; None in a half that scales no gradient."""
    decoded: tuple[tuple[str, str], ...] = ()
    """GEMMs with operands in blocks that are decoded although the device multiplies blocks: which, and why."""

    @cached_property
    def coded_rows(self) -> tuple[int, ...]:
        """Return the rows of the table whose statistics are counted from codes."""
        return tuple(result.row for result in self.coded)

    @cached_property
    def coded_formats(self) -> tuple[Format, ...]:
        """Return the formats of the codes in `coded_rows`."""
        return tuple(parse(result.format) for result in self.coded)

    @property
    def all_rows(self) -> tuple[int, ...]:
        """Return all rows of the table that have statistics."""
        return (*self.rows, *self.coded_rows)
