"""Measure what a tensor loses in a format, or in the cast with which its graph stores it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fxprec.diagnosis.lab import Cast, Read
from fxprec.driver.numerics_watch import cast_bias
from fxprec.ir.symbolic import CARRIED, DEQUANTIZE, QUANTIZE, TENSOR_SCALE, Dequantize, is_in_blocks
from fxprec.numerics.bias import Bias
from fxprec.numerics.blocks import AnyFormat, BlockFormat, find
from fxprec.numerics.rounding import COMPILE_ABOVE, quantize
from fxprec.numerics.rows import format_row
from fxprec.numerics.stats import count


@dataclass(frozen=True)
class Lost:
    """The losses of a tensor. Shares are shares of its elements."""

    error: float
    """L2 norm of the difference over the L2 norm of the tensor."""
    gain: float
    """<read, exact> / <exact, exact>: 1 unless the scale is wrong."""
    overflow: float
    underflow: float
    zeros: float
    """Share of exact zeros in the values that are read."""
    largest: float
    """Largest magnitude in the tensor."""


def lost(x: Tensor, read: Tensor, fmt: AnyFormat) -> Lost:
    """Measure the losses of ``read``, which is float32 ``x`` stored in ``fmt``."""
    elements = max(x.numel(), 1)
    wide, difference = x.double(), (read.double() - x.double())
    square = float(wide.square().sum())
    over, under, amax = _range(x, read, fmt) if x.numel() else (0.0, 0.0, 0.0)
    error = math.sqrt(float(difference.square().sum()) / square) if square else 0.0
    return Lost(
        error=error if math.isfinite(error) else math.inf,
        gain=float((read.double() * wide).sum()) / square if square else 1.0,
        overflow=over / elements,
        underflow=under / elements,
        zeros=float((read == 0).sum()) / elements,
        largest=amax,
    )


def _range(x: Tensor, read: Tensor, fmt: AnyFormat) -> tuple[float, float, float]:
    """Return elements that over- and underflow, and the largest magnitude; blocks do not overflow."""
    if isinstance(fmt, BlockFormat):
        return 0.0, float(((read == 0) & (x != 0)).sum()), float(x.abs().max())
    over, under, amax, _ = (float(n) for n in count(x, x, format_row(fmt)))
    return over, under, amax


def rounded(x: Tensor, fmt: AnyFormat) -> Tensor:
    """Return float32 ``x`` rounded to a format; in pieces, except for blocks, so that no kernel is compiled."""
    if isinstance(fmt, BlockFormat) or x.numel() <= COMPILE_ABOVE:
        return quantize(x, fmt)
    return torch.cat([quantize(piece, fmt) for piece in x.reshape(-1).split(COMPILE_ABOVE)]).view_as(x)


def to_format(fmt: str) -> Read:
    """Return a reader of copies in a format; it keeps the signs that the pass keep-signs would keep."""
    known = find(fmt)
    nearest = 0.0 if isinstance(known, BlockFormat) else known.smallest_subnormal

    def read(cast: Cast, x: Tensor) -> Tensor:
        wide = x.float()
        if cast.keeps_above:
            wide = torch.where(wide > 0, wide.clamp_min(nearest), wide)
        if cast.keeps_below:
            wide = torch.where(wide < 0, wide.clamp_max(-nearest), wide)
        return rounded(wide, known).to(x.dtype)

    return read


def as_cast(table: Tensor) -> Read:
    """Return a reader of copies as the graph stores and reads them, with its scale table and its faults."""

    def read(cast: Cast, x: Tensor) -> Tensor:
        if not cast.reads:
            return x
        call, back = cast.call, cast.reads[0]
        _, codes, whole = _stored(table, cast, x)
        if is_in_blocks(call.format):
            given = codes, table, back.row, back.format, back.storage, x.dtype, x.numel(), whole
            found: Tensor = DEQUANTIZE(*given)
            return found.view(x.shape)
        found = DEQUANTIZE(codes, table, back.row, back.format, back.storage, torch.float32)
        put_on = int(table[call.row, CARRIED]) + int(table[call.row, 0]) if cast.in_backward else 0
        return (found * 2.0 ** (_taken_off(table, cast, back) - put_on)).to(x.dtype)

    return read


def bias_of(table: Tensor, cast: Cast, x: Tensor, fmt: AnyFormat) -> Bias:
    """Measure how biased the rounding of a copy of ``x`` to ``fmt`` is, as the graph stores it."""
    given, codes, whole = _stored(table, cast, x)
    return cast_bias(given, codes, cast.call, fmt, table, whole)


def _stored(table: Tensor, cast: Cast, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Store ``x`` as the graph does; return the input of the cast, its codes, and the scale of a tensor in blocks.

    A gradient as input has its scale on. Stochastic rounding uses another seed.
    """
    call = cast.call
    if is_in_blocks(call.format):
        seed = None if call.seed is None else torch.tensor([cast.call.row], dtype=torch.int32, device=x.device)
        whole = None if call.whole is None else TENSOR_SCALE(x, call.format)
        return x, QUANTIZE(x, table, call.row, call.format, call.storage, seed, whole), whole
    carried = x * 2.0 ** (int(table[call.row, CARRIED]) if cast.in_backward else 0)
    return carried, QUANTIZE(carried, table, call.row, call.format, call.storage), None


def _taken_off(table: Tensor, cast: Cast, back: Dequantize) -> int:
    """Return the gradient-scale exponent that reading takes off, even off a forward value that gradients multiply."""
    own = 0 if cast.in_backward else int(table[cast.call.row, 0])
    return 0 if back.is_as_stored else int(table[back.row, 0]) - own


def stored_format(cast: Cast, planned: str) -> AnyFormat:
    """Return the format that a cast stores in; in ``simulate``, where the table holds it, the plan's."""
    return find(planned if cast.call.is_simulated else cast.call.format)


def bits_of(fmt: str) -> float:
    """Return the bits per element, including its share of a block's scale."""
    known = find(fmt)
    return known.bits_per_element if isinstance(known, BlockFormat) else known.bits
