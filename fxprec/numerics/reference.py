"""Slow and simple arithmetic of number formats, which decides when a fast path is in doubt.

All arithmetic is in float64, where each step below is exact. The module shares no code with the codec.
Definitions: docs/algorithms.md, "Number formats".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fxprec.numerics.formats import Format, parse
from fxprec.numerics.rows import FormatRow, as_float


class Grid(NamedTuple):
    """A format as rounding needs it: its numbers, and the result of an overflow."""

    mantissa_bits: int
    min_exponent: int
    """Exponent of the smallest normal number."""
    largest: float
    beyond: float
    """The result of an overflow: the largest number, inf or NaN."""

    @classmethod
    def of(cls, fmt: Format) -> Grid:
        """Return the grid of a format."""
        beyond = {"saturate": fmt.largest, "inf": math.inf, "nan": math.nan}[str(fmt.overflow)]
        return cls(fmt.mantissa_bits, fmt.min_exponent, fmt.largest, beyond)

    @classmethod
    def of_row(cls, row: FormatRow[int]) -> Grid:
        """Return the grid that a row of the scale table (Python ints) stands for."""
        smallest, largest, beyond = (float(as_float(bits)) for bits in (row.min_normal, row.largest, row.overflow))
        return cls(23 - row.shift, math.frexp(smallest)[1] - 1, largest, beyond)

    @property
    def max_exponent(self) -> int:
        """Return the exponent of the largest number."""
        return math.frexp(self.largest)[1] - 1


class Stats(NamedTuple):
    """The number of elements that rounding to a format loses, and the largest magnitude."""

    overflow: int
    underflow: int
    amax: float


def reference_encode(x: torch.Tensor, fmt: Format | str) -> torch.Tensor:
    """Return the codes of ``x`` rounded to nearest, ties to the even code, in ``fmt.code_dtype``, shape of ``x``.

    NaN becomes the NaN code, or the largest number if the format has no NaN.
    """
    fmt = parse(fmt)
    units, binade = _rounded(x.double().abs(), Grid.of(fmt))
    code = units.long() + ((binade - fmt.min_exponent) << fmt.mantissa_bits)
    code = _with(code, code > fmt.largest_code, fmt.overflow_code)
    code = _with(code, x.isnan(), fmt.largest_code if fmt.nan_code is None else fmt.nan_code)
    code = code + (torch.signbit(x).long() << (fmt.bits - 1))
    return code.to(fmt.code_dtype)


def reference_decode(code: torch.Tensor, fmt: Format | str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the numbers of integer codes as ``dtype``, in the shape and order of dimensions of ``code``."""
    fmt = parse(fmt)
    bits = code.long() & ((1 << fmt.bits) - 1)
    if bits.numel() <= 4 << fmt.bits:
        return _decoded(bits, fmt).to(dtype)
    every = _decoded(torch.arange(1 << fmt.bits, device=code.device), fmt)
    found = every.index_select(0, bits.flatten()).view(bits.shape).to(dtype)
    return found if code.is_contiguous() else torch.empty_like(code, dtype=dtype).copy_(found)


def _decoded(bits: torch.Tensor, fmt: Format) -> torch.Tensor:
    value = _value(bits & ((1 << (fmt.bits - 1)) - 1), fmt)
    return torch.where(bits >> (fmt.bits - 1) == 1, -value, value)


def reference_quantize(x: torch.Tensor, fmt: Format | str) -> torch.Tensor:
    """Return ``x`` rounded to the nearest number of ``fmt``, in the dtype and shape of ``x``; NaN stays NaN."""
    rounded = reference_decode(reference_encode(x, fmt), fmt, torch.float64)
    return torch.where(x.isnan(), x, rounded.to(x.dtype))


def reference_round(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return ``x`` rounded to the nearest number of a grid, ties to even, in the dtype of ``x``; NaN stays NaN."""
    units, binade = _rounded(x.double().abs(), grid)
    value = units * _power_of_2(binade - grid.mantissa_bits)
    value = _with(value, value > grid.largest, grid.beyond)
    value = torch.copysign(value, x).to(x.dtype)
    return _with(value, x.isnan(), x)


def reference_stats(x: torch.Tensor, fmt: Format | str | Grid) -> Stats:
    """Count the values that overflow (|x| >= largest + half a unit, inf, NaN) and underflow (non-zero to zero).

    A value underflows if it is at most half of the smallest number: a tie goes to zero, whose code is even.
    """
    grid = fmt if isinstance(fmt, Grid) else Grid.of(parse(fmt))
    magnitude = x.double().abs()
    half_unit = 2.0 ** (grid.max_exponent - grid.mantissa_bits - 1)
    half_smallest = 2.0 ** (grid.min_exponent - grid.mantissa_bits - 1)
    overflow = int((~(magnitude < grid.largest + half_unit)).sum())
    underflow = int(((magnitude > 0) & (magnitude <= half_smallest)).sum())
    return Stats(overflow, underflow, float(magnitude.max()) if magnitude.numel() else 0.0)


def _rounded(magnitude: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float64 magnitudes as if the exponent had no upper limit.

    Returns the magnitudes in units of the last place (float64) and their binade before rounding (int64), at least that
    of the smallest normal number. NaN counts as 0, inf as float64's largest number, which is beyond every format's.
    """
    magnitude = magnitude.nan_to_num(0.0)
    binade = (magnitude.clamp(min=2.0**grid.min_exponent).view(torch.int64) >> 52) - 1023
    units = magnitude / _power_of_2(binade - grid.mantissa_bits)
    if grid.mantissa_bits:
        return units.round(), binade  # a tie goes to the even number of units, whose code is even
    down = units.floor()
    odd = (down.long() + binade - grid.min_exponent) & 1 == 1
    return down + ((units - down > 0.5) | ((units - down == 0.5) & odd)), binade


def _power_of_2(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2 to the power of int64 exponents from -1022 to 1023, by writing float64's exponent field."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _with(x: torch.Tensor, condition: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """Return ``value`` where the condition holds, else ``x``; skip the slow `torch.where` where it never holds."""
    return torch.where(condition, value, x) if condition.any() else x


def _value(magnitude: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the float64 values of magnitude bits."""
    exponent = magnitude >> fmt.mantissa_bits
    mantissa = (magnitude & ((1 << fmt.mantissa_bits) - 1)).double() / (1 << fmt.mantissa_bits)
    normal = torch.ldexp(1 + mantissa, exponent - fmt.offset)
    subnormal = torch.ldexp(mantissa, torch.tensor(fmt.min_exponent, dtype=torch.float64, device="cpu"))
    value = torch.where(exponent > 0, normal, subnormal)
    value = torch.where(magnitude > fmt.largest_code, torch.inf, value)
    if fmt.specials == "ieee":
        return torch.where(magnitude > fmt.largest_code + 1, torch.nan, value)
    if fmt.specials == "fn":
        return torch.where(magnitude == (1 << (fmt.bits - 1)) - 1, torch.nan, value)
    return value
