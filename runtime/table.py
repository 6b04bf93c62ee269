"""The scale table: one int32 row per site, cast or rescale; an input of every compiled graph.

Column 0 is the scale exponent. The next eight columns parameterise rounding for storage ``simulate``
(`rows.FormatRow`). The last two are `symbolic.CARRIED` and `symbolic.MEASURE`. A change makes a new tensor, so the
backward of a step always reads the table of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from fxprec.ir.symbolic import CARRIED, MEASURE, TABLE_COLUMNS
from fxprec.numerics.formats import parse
from fxprec.numerics.rows import format_row
from fxprec.plan import Site
from fxprec.plan.scales import Cast, ScaleGraph, Slot
from fxprec.runtime.on_device import upload


@dataclass(frozen=True)
class Formats:
    """Everything that the rounding columns of the table depend on."""

    sites: tuple[Site, ...]
    scales: ScaleGraph | None
    num_rows: int
    held: tuple[tuple[int, str], ...] = ()
    """Formats in force instead of the plan's, by site."""


@dataclass(frozen=True)
class TableState:
    """Everything that the table depends on."""

    formats: Formats
    exps: tuple[int, ...]
    """The exponent of each variable of the scale graph."""
    copies: tuple[int, ...]
    """The exponent of each scaled copy of the scale graph."""
    measures: bool


class ScaleTable:
    """The table on its device: the same tensor until its state changes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._formats = Latest(format_rows)
        self._table = Latest(self.made)

    def of(self, state: TableState) -> torch.Tensor:
        """Return the (rows, TABLE_COLUMNS) int32 table."""
        return self._table(state)

    def made(self, state: TableState) -> torch.Tensor:
        """Make the table of a state, on the device."""
        formats = self._formats(state.formats)
        scales = state.formats.scales
        table = formats
        if scales is not None:
            table = with_scales(formats, scales, state.exps, state.copies, measure=state.measures)
        return upload(table, self._device)


_K = TypeVar("_K")
_V = TypeVar("_V")


class Latest(Generic[_K, _V]):
    """A function that remembers its last argument and value. Threads may call it at the same time."""

    def __init__(self, function: Callable[[_K], _V]) -> None:
        self._function = function
        self._last: tuple[_K, _V] | None = None

    def __call__(self, of: _K) -> _V:
        last = self._last
        if last is None or last[0] != of:
            last = self._last = of, self._function(of)
        return last[1]


def format_rows(formats: Formats) -> torch.Tensor:
    """Return the (rows, TABLE_COLUMNS) int32 table without scales. Unused rows are zero."""
    table = [[0] * TABLE_COLUMNS for _ in range(formats.num_rows)]
    held, scales = dict(formats.held), formats.scales
    used = [(site.id, held.get(site.id, site.format)) for site in formats.sites]
    casts = (v for v in (() if scales is None else scales.variables) if isinstance(v, Cast))
    used += [(v.row, held.get(v.site, v.format)) for v in casts]
    for row, fmt in used:
        table[row] = [0, *format_row(parse(fmt))[1:], 0, 0]
    return torch.tensor(table, dtype=torch.int32, device="cpu")


def with_scales(
    base: torch.Tensor, scales: ScaleGraph, exps: Sequence[int], copies: Sequence[int] = (), *, measure: bool
) -> torch.Tensor:
    """Return a copy of ``base`` (`format_rows`) with the scale exponents and the flag to measure.

    ``exps`` has one exponent per variable of ``scales``, ``copies`` one per scaled copy.
    """
    of_copies = dict(zip((copy.row for copy in scales.copies), copies, strict=True)) if copies else {}

    def exp(variable: int | None) -> int:
        return 0 if variable is None else exps[variable]

    def shift(slot: Slot) -> int:
        of_copy, off_copy = (0 if row is None else of_copies.get(row, 0) for row in (slot.plus_copy, slot.minus_copy))
        return exp(slot.plus) - exp(slot.minus) + of_copy - off_copy

    table = base.clone()
    shifts = {slot.row: shift(slot) for slot in scales.slots} | of_copies
    carried = {v.row: exp(v.source) for v in scales.variables if isinstance(v, Cast)}
    shifts |= {row: exps[variable] - carried[row] for row, variable in scales.casts.items()}
    table[list(shifts), 0] = torch.tensor(list(shifts.values()), dtype=torch.int32, device="cpu")
    table[list(carried), CARRIED] = torch.tensor(list(carried.values()), dtype=torch.int32, device="cpu")
    table[:, MEASURE] = int(measure)
    return table
