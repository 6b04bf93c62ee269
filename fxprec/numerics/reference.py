"""The slow, obvious arithmetic of number formats that decides when a fast path is in doubt.

Everything goes through float64, where each step below is exact, and shares no code with the codec.
Definitions: docs/algorithms.md, "Number formats".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fxprec.numerics.formats import Format, parse
from fxprec.numerics.rows import FormatRow, as_float


class Grid(NamedTuple):
    """The numbers a format has, and what becomes of larger ones: all that rounding to it needs."""

    mantissa_bits: int
    min_exponent: int
    """Of the smallest normal number."""
    largest: float
    beyond: float
    """What overflows becomes."""

    @classmethod
    def of(cls, fmt: Format) -> Grid:
        beyond = {"saturate": fmt.largest, "inf": math.inf, "nan": math.nan}[str(fmt.overflow)]
        return cls(fmt.mantissa_bits, fmt.min_exponent, fmt.largest, beyond)

    @classmethod
    def of_row(cls, row: FormatRow[int]) -> Grid:
        """Return the grid that a row of the scale table (Python ints) stands for."""
        smallest, largest, beyond = (float(as_float(bits)) for bits in (row.min_normal, row.largest, row.overflow))
        return cls(23 - row.shift, math.frexp(smallest)[1] - 1, largest, beyond)

    @property
    def max_exponent(self) -> int:
        return math.frexp(self.largest)[1] - 1


class Stats(NamedTuple):
    """What rounding a tensor to a format does to its values; counts are elements."""

    overflow: int
    underflow: int
    amax: float


def reference_encode(x: torch.Tensor, fmt: Format | str) -> torch.Tensor:
    """Return the codes of ``x`` rounded to nearest, ties to the even code, in ``fmt.code_dtype``, shape of ``x``.

    NaN becomes the NaN code, or the largest number where the format has none.
    """
    fmt = parse(fmt)
    magnitude = x.double().abs()
    code = _rounded_code(torch.where(magnitude.isfinite(), magnitude, 0.0), Grid.of(fmt))
    beyond = (code > fmt.largest_code) | magnitude.isinf()
    code = torch.where(beyond, fmt.overflow_code, code)
    nan_code = fmt.largest_code if fmt.nan_code is None else fmt.nan_code
    code = torch.where(x.isnan(), nan_code, code)
    code = code + torch.signbit(x).long() * (1 << (fmt.bits - 1))
    return code.to(fmt.code_dtype)


def reference_decode(code: torch.Tensor, fmt: Format | str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the numbers of integer codes as ``dtype``, shape of ``code``."""
    fmt = parse(fmt)
    bits = code.long()
    magnitude = bits & ((1 << (fmt.bits - 1)) - 1)
    value = _value(magnitude, fmt)
    value = torch.where(bits >> (fmt.bits - 1) & 1 == 1, -value, value)
    return value.to(dtype)


def reference_quantize(x: torch.Tensor, fmt: Format | str) -> torch.Tensor:
    """Return ``x`` rounded to the nearest number of ``fmt``, in the dtype and shape of ``x``; NaN stays NaN."""
    rounded = reference_decode(reference_encode(x, fmt), fmt, torch.float64)
    return torch.where(x.isnan(), x, rounded.to(x.dtype))


def reference_round(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return ``x`` rounded to the nearest number of a grid, ties to even, in the dtype of ``x``; NaN stays NaN."""
    magnitude = x.double().abs()
    code = _rounded_code(torch.where(magnitude.isfinite(), magnitude, 0.0), grid)
    exponent, mantissa = code >> grid.mantissa_bits, code & ((1 << grid.mantissa_bits) - 1)
    fraction = mantissa.double() / (1 << grid.mantissa_bits)
    normal = torch.ldexp(1 + fraction, exponent - 1 + grid.min_exponent)
    value = torch.where(exponent > 0, normal, torch.ldexp(fraction, torch.tensor(grid.min_exponent, dtype=torch.int64)))
    value = torch.where((value > grid.largest) | magnitude.isinf(), grid.beyond, value)
    return torch.where(x.isnan(), x, torch.where(torch.signbit(x), -value, value).to(x.dtype))


def reference_stats(x: torch.Tensor, fmt: Format | str | Grid) -> Stats:
    """Count the values that overflow (|x| >= largest + half a unit, inf, NaN) and underflow (non-zero to zero)."""
    grid = fmt if isinstance(fmt, Grid) else Grid.of(parse(fmt))
    magnitude = x.double().abs()
    half_unit = 2.0 ** (grid.max_exponent - grid.mantissa_bits - 1)
    overflow = int((~(magnitude < grid.largest + half_unit)).sum())
    finite = magnitude[magnitude.isfinite()]
    underflow = int(((_rounded_code(finite, grid) == 0) & (finite > 0)).sum())
    return Stats(overflow, underflow, float(magnitude.max()) if magnitude.numel() else 0.0)


def _rounded_code(magnitude: torch.Tensor, fmt: Grid) -> torch.Tensor:
    """Codes of finite, non-negative float64 magnitudes as if the exponent had no upper end."""
    _, exponent = torch.frexp(magnitude)
    binade = torch.where(magnitude > 0, exponent.long() - 1, fmt.min_exponent).clamp(min=fmt.min_exponent)
    units = torch.ldexp(magnitude, fmt.mantissa_bits - binade)  # in units of the last place
    down = units.floor()
    code = down.long() + (binade - fmt.min_exponent) * (1 << fmt.mantissa_bits)
    remainder = units - down
    up = (remainder > 0.5) | ((remainder == 0.5) & (code % 2 == 1))
    return code + up.long()


def _value(magnitude: torch.Tensor, fmt: Format) -> torch.Tensor:
    """float64 values of magnitude bits."""
    exponent = magnitude >> fmt.mantissa_bits
    mantissa = (magnitude & ((1 << fmt.mantissa_bits) - 1)).double() / (1 << fmt.mantissa_bits)
    normal = torch.ldexp(1 + mantissa, exponent - fmt.offset)
    subnormal = torch.ldexp(mantissa, torch.tensor(fmt.min_exponent, dtype=torch.float64))
    value = torch.where(exponent > 0, normal, subnormal)
    value = torch.where(magnitude > fmt.largest_code, torch.inf, value)
    if fmt.specials == "ieee":
        return torch.where(magnitude > fmt.largest_code + 1, torch.nan, value)
    if fmt.specials == "fn":
        return torch.where(magnitude == (1 << (fmt.bits - 1)) - 1, torch.nan, value)
    return value
