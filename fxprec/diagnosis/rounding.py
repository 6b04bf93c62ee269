"""What a tensor loses in a format, or in the very cast that its graph stores it with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fxprec.diagnosis.lab import Cast
from fxprec.ir.symbolic import CARRIED, DEQUANTIZE, QUANTIZE, Dequantize
from fxprec.numerics.formats import Format, parse
from fxprec.numerics.rounding import COMPILE_ABOVE, quantize
from fxprec.numerics.rows import format_row
from fxprec.numerics.stats import count

Round = Callable[[Cast, Tensor], Tensor]


@dataclass(frozen=True)
class Lost:
    """Shares are of the tensor's elements."""

    error: float
    """L2 of the difference over L2 of the tensor."""
    gain: float
    """<read, exact> / <exact, exact>: 1 but for a wrong scale."""
    overflow: float
    underflow: float
    zeros: float
    """Exact zeros among what is read."""
    largest: float
    """Magnitude in the tensor."""


def lost(x: Tensor, read: Tensor, fmt: Format) -> Lost:
    """Measure what ``read`` lost of float32 ``x``, stored in ``fmt``."""
    elements = max(x.numel(), 1)
    wide, difference = x.double(), (read.double() - x.double())
    square = float(wide.square().sum())
    over, under, amax, _ = (float(n) for n in count(x, x, format_row(fmt))) if x.numel() else (0.0, 0.0, 0.0, 0.0)
    error = math.sqrt(float(difference.square().sum()) / square) if square else 0.0
    return Lost(
        error=error if math.isfinite(error) else math.inf,
        gain=float((read.double() * wide).sum()) / square if square else 1.0,
        overflow=over / elements,
        underflow=under / elements,
        zeros=float((read == 0).sum()) / elements,
        largest=amax,
    )


def rounded(x: Tensor, fmt: str) -> Tensor:
    """Return float32 ``x`` rounded to a format, in pieces that need no compiled kernel."""
    if x.numel() <= COMPILE_ABOVE:
        return quantize(x, fmt)
    flat = x.reshape(-1)
    return torch.cat([quantize(piece, fmt) for piece in flat.split(COMPILE_ABOVE)]).view_as(x)


def to_format(fmt: str) -> Round:
    """Return the reader of copies in a format; signs that backward asks for are kept, as the pass keep-signs would."""
    nearest = parse(fmt).smallest_subnormal

    def read(cast: Cast, x: Tensor) -> Tensor:
        wide = x.float()
        if cast.keeps_above:
            wide = torch.where(wide > 0, wide.clamp_min(nearest), wide)
        if cast.keeps_below:
            wide = torch.where(wide < 0, wide.clamp_max(-nearest), wide)
        return rounded(wide, fmt).to(x.dtype)

    return read


def as_cast(table: Tensor) -> Round:
    """Return the reader of copies as the graph itself stores and reads them, with its scale table, faults and all."""

    def read(cast: Cast, x: Tensor) -> Tensor:
        if not cast.reads:
            return x
        call, back = cast.call, cast.reads[0]
        carried = int(table[call.row, CARRIED]) if cast.in_backward else 0
        stored = QUANTIZE(x * 2.0**carried, table, call.row, call.format, call.storage)
        found = DEQUANTIZE(stored, table, back.row, back.format, back.storage, torch.float32)
        put_on = carried + int(table[call.row, 0]) if cast.in_backward else 0
        read_back: Tensor = (found * 2.0 ** (_taken_off(table, cast, back) - put_on)).to(x.dtype)
        return read_back

    return read


def _taken_off(table: Tensor, cast: Cast, back: Dequantize) -> int:
    """Return the exponent of the gradients' scale that reading takes off, also off a forward value they multiply."""
    own = not cast.in_backward and back.row == cast.row
    return 0 if back.is_as_stored or own else int(table[back.row, 0])


def stored_format(cast: Cast, planned: str) -> Format:
    """Return the format a cast stores in: its own, or in ``simulate``, where the table says it, the plan's."""
    return parse(planned if cast.call.is_simulated else cast.call.format)
