"""The scale table: one int32 row per site, an input of every compiled graph.

Column 0 is the scale exponent; the others parameterise rounding for storage ``simulate`` (`codec.format_row`). A
change makes a new tensor: the backward of a step always reads the table of its forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxprec.codec import format_row
from fxprec.formats import parse
from fxprec.plan import Site
from fxprec.symbolic import TABLE_COLUMNS

MAX_SCALE_EXP = 100  # x * 2**k and its inverse stay normal float32 numbers


def build_table(sites: Sequence[Site], scale_exps: dict[int, int], rows: int, device: torch.device) -> torch.Tensor:
    """Return the (rows, 8) int32 table; rows beyond the sites are zero and never read."""
    table = torch.zeros(rows, TABLE_COLUMNS, dtype=torch.int32)
    for site in sites:
        table[site.id] = torch.tensor([scale_exps.get(site.id, 0), *format_row(parse(site.format))[1:]])
    return table.to(device, non_blocking=True)
