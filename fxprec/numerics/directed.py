"""Round toward zero, up and stochastically, to a format given as a row, as `fxprec.numerics.codec.nearest` takes it."""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.numerics.codec import nearest
from fxprec.numerics.rows import INFINITY, MAGNITUDE, SIGN, FormatRow, Scalar, as_float


def truncated(x: Tensor, row: FormatRow[Scalar]) -> Tensor:
    """Round float32 ``x`` toward zero: in every format, finite values beyond the largest number become that number.

    Inf and NaN are rounded as in `nearest`.
    """
    down, _ = _split(x, row)
    special = x.view(torch.int32) & MAGNITUDE >= INFINITY
    bits = torch.where(down > row.largest, row.largest, down) | (x.view(torch.int32) & SIGN)
    return torch.where(special, nearest(x, row), bits.view(torch.float32))


def raised(x: Tensor, row: FormatRow[Scalar]) -> Tensor:
    """Round float32 ``x``, which is not negative, to the least number not below it, at most the largest.

    Inf and NaN are rounded as in `nearest`.
    """
    down, fraction = _split(x, row)
    bits = torch.where(fraction > 0, _next_up(down, row), down)
    bits = torch.where(bits > row.largest, row.largest, bits)
    return torch.where(x.view(torch.int32) >= INFINITY, nearest(x, row), bits.view(torch.float32))


def dithered(x: Tensor, random: Tensor, row: FormatRow[Scalar]) -> Tensor:
    """Round float32 ``x`` up in magnitude with probability (|x| - down) / (up - down), else down.

    ``random`` is int32 of the shape of ``x``, uniform in [0, 2^31). The probability is exact if it is a multiple of
    2^-31. Only magnitudes below 2^-7 units of the smallest subnormal miss it, by less than 2^-31. Values beyond the
    largest number are rounded as in `nearest`.
    """
    down, fraction = _split(x, row)
    bits = torch.where(random < fraction, _next_up(down, row), down)
    sign = x.view(torch.int32) & SIGN
    beyond = (x.view(torch.int32) & MAGNITUDE) > row.largest
    return torch.where(beyond, nearest(x, row), (bits | sign).view(torch.float32))


def _split(x: Tensor, row: FormatRow[Scalar]) -> tuple[Tensor, Tensor]:
    """Return magnitude bits truncated to the format, and the remainder in units of 2^-31 of the last place."""
    magnitude = x.view(torch.int32) & MAGNITUDE
    field = torch.clamp_min(magnitude >> 23, 1)
    significand = magnitude - ((field - 1) << 23)
    dropped = torch.clamp_min((row.min_normal >> 23) - field, 0) + row.shift
    kept = significand >> torch.clamp_max(dropped, 31)
    subnormal = ((kept + row.magic).view(torch.float32) - as_float(row.magic)).view(torch.int32)
    normal = (kept << row.shift) + ((field - 1) << 23)
    fine = (significand << torch.clamp_min(31 - dropped, 0)) & MAGNITUDE
    coarse = significand >> torch.clamp(dropped - 31, 0, 31)
    fraction = torch.where(dropped > 31, coarse, fine)
    return torch.where(magnitude < row.min_normal, subnormal, normal), fraction


def _next_up(down: Tensor, row: FormatRow[Scalar]) -> Tensor:
    """Return the bits of the format's next number above ``down``."""
    anchor = as_float(row.magic)
    above = (down.view(torch.float32) + anchor).view(torch.int32) + 1
    subnormal = (above.view(torch.float32) - anchor).view(torch.int32)
    normal = ((down >> row.shift) + 1) << row.shift
    return torch.where(down < row.min_normal, subnormal, normal)
