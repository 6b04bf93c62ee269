"""Shorter versions of the codec's functions for formats whose numbers are float32's with a shorter mantissa.

Such a format has float32's own subnormals, so these functions need fewer operations. They give the bits of the general
ones (`codec.nearest`, `directed.dithered`), with NaN quieted; tests compare them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.numerics.formats import Format
from fxprec.numerics.rows import INFINITY, MAGNITUDE, QUIET_NAN, SIGN, FormatRow, format_row, thresholds

_FLOAT32_MIN_EXPONENT = -126


def shares_exponents(fmt: Format) -> bool:
    """Return whether the format's numbers are float32's with a shorter mantissa, subnormals included."""
    return fmt.min_exponent == _FLOAT32_MIN_EXPONENT and 0 < fmt.mantissa_bits < 23


def carries_into_infinity(row: FormatRow[int]) -> bool:
    """Return whether rounding past the largest number gives inf without a comparison, as in bfloat16."""
    return bool(row.largest + (1 << row.shift) == row.overflow == INFINITY)


def nearest_cut(x: Tensor, row: FormatRow[int]) -> Tensor:
    """Round to nearest even where `carries_into_infinity`: the sign stays in place, so 9 operations replace 14."""
    bits = x.view(torch.int32)
    rounded = (bits + (row.addend + ((bits >> row.shift) & 1))) & -(1 << row.shift)
    return torch.where(x != x, QUIET_NAN | (bits & SIGN), rounded).view(torch.float32)


def nearest_short(x: Tensor, row: FormatRow[int]) -> Tensor:
    """Round to nearest even where `shares_exponents`: the format has no subnormals of its own."""
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    rounded = ((magnitude + row.addend + ((magnitude >> row.shift) & 1)) >> row.shift) << row.shift
    rounded = torch.where(rounded > row.largest, row.overflow, rounded)
    rounded = torch.where(magnitude > INFINITY, QUIET_NAN, rounded)
    return (rounded | (bits & SIGN)).view(torch.float32)


def dithered_short(x: Tensor, random: Tensor, fmt: Format) -> Tensor:
    """Round as `directed.dithered` where `shares_exponents`: add random bits below the kept mantissa, then truncate.

    Source: docs/algorithms.md, "16-bit training".
    """
    row = format_row(fmt)
    limits = thresholds(row)
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    below = ((1 << row.shift) - 1) - (random >> (31 - row.shift))
    rounded = ((magnitude + below) >> row.shift) << row.shift
    rounded = torch.where(magnitude > row.largest, row.largest, rounded)
    rounded = torch.where(magnitude >= limits.overflow, row.overflow, rounded)
    rounded = torch.where(magnitude > INFINITY, QUIET_NAN, rounded)
    return (rounded | (bits & SIGN)).view(torch.float32)
