"""The scale table: one int32 row per site, cast or rescale; an input of every compiled graph.

Column 0 is the scale exponent; the next eight parameterise rounding for storage ``simulate`` (`rows.FormatRow`),
the last two are `symbolic.CARRIED` and `symbolic.MEASURE`. A change makes a new tensor: the backward of a step always
reads the table of its forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fxprec.ir.symbolic import CARRIED, MEASURE, TABLE_COLUMNS
from fxprec.numerics.formats import parse
from fxprec.numerics.rows import format_row
from fxprec.plan import Site
from fxprec.plan.scales import Cast, ScaleGraph


def format_rows(
    sites: Sequence[Site], rows: int, scales: ScaleGraph | None = None, held: Mapping[int, str] | None = None
) -> torch.Tensor:
    """Return the (rows, TABLE_COLUMNS) int32 table without scales. Rows that nobody uses are zero.

    ``held`` names other formats than the plan's, by site.
    """
    table = [[0] * TABLE_COLUMNS for _ in range(rows)]
    held = held or {}
    used = [(site.id, held.get(site.id, site.format)) for site in sites]
    casts = (v for v in (() if scales is None else scales.variables) if isinstance(v, Cast))
    used += [(v.row, held.get(v.site, v.format)) for v in casts]
    for row, fmt in used:
        table[row] = [0, *format_row(parse(fmt))[1:], 0, 0]
    return torch.tensor(table, dtype=torch.int32)


def with_scales(base: torch.Tensor, scales: ScaleGraph, exps: Sequence[int], *, measure: bool) -> torch.Tensor:
    """Return a copy of `format_rows` with exponents, ``exps`` by variable of ``scales``, and the flag to measure."""

    def exp(variable: int | None) -> int:
        return 0 if variable is None else exps[variable]

    table = base.clone()
    shifts = {slot.row: exp(slot.plus) - exp(slot.minus) for slot in scales.slots}
    carried = {v.row: exp(v.source) for v in scales.variables if isinstance(v, Cast)}
    shifts |= {row: exps[variable] - carried[row] for row, variable in scales.casts.items()}
    table[list(shifts), 0] = torch.tensor(list(shifts.values()), dtype=torch.int32)
    table[list(carried), CARRIED] = torch.tensor(list(carried.values()), dtype=torch.int32)
    table[:, MEASURE] = int(measure)
    return table
