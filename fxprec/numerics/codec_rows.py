"""More arithmetic with a format given as runtime integers: directed rounding, and codes to and from numbers.

Beside `fxprec.numerics.codec.round_with_row` it lets one compiled kernel serve every format.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fxprec.numerics.codec import INFINITY, MAGNITUDE, QUIET_NAN, SIGN, Scalar, as_float, float_bits, round_with_row
from fxprec.numerics.formats import Format


class CodeRow(NamedTuple):
    """What turns numbers of a format into codes and back, as int32 numbers."""

    shift: int
    """23 - M."""
    min_normal: int
    """float32 bits of the smallest normal number."""
    magic: int
    """float32 bits of 2^(min_exponent + shift): its unit is the smallest subnormal."""
    rebias: int
    """float32 bits of 2^(-B): the difference of the two exponent codes, in place."""
    sign: int
    """The code's sign bit; of 32 bits, int32's own."""
    largest: int
    """Magnitude bits of the largest number."""
    inf: int
    """Magnitude bits that inf gets; only the largest number's in formats that cannot hold it."""
    nan: int
    """Magnitude bits that NaN gets."""
    last_inf: int
    """Magnitude bits above ``largest`` and up to this one read as inf, the rest as NaN."""


def code_row(fmt: Format) -> CodeRow:
    """Return the code row of ``fmt``."""
    shift = 23 - fmt.mantissa_bits
    every = (1 << (fmt.bits - 1)) - 1
    last_inf = {"none": every, "ieee": fmt.largest_code + 1, "fn": fmt.largest_code}[fmt.specials]
    return CodeRow(
        shift=shift,
        min_normal=float_bits(fmt.smallest_normal),
        magic=float_bits(2.0 ** (fmt.min_exponent + shift)),
        rebias=(127 - fmt.offset) << 23,
        sign=1 << (fmt.bits - 1) if fmt.bits < 32 else SIGN,
        largest=fmt.largest_code,
        inf=fmt.overflow_code,
        nan=fmt.largest_code if fmt.nan_code is None else fmt.nan_code,
        last_inf=last_inf,
    )


def codes_with_row(
    number: torch.Tensor,
    shift: Scalar,
    min_normal: Scalar,
    magic: Scalar,
    rebias: Scalar,
    sign: Scalar,
    largest: Scalar,
    inf: Scalar,
    nan: Scalar,
    last_inf: Scalar = 0,
) -> torch.Tensor:
    """Return int32 codes of float32 tensors that hold only numbers of the format, inf and NaN."""
    bits = number.view(torch.int32)
    magnitude = bits & MAGNITUDE
    normal = (magnitude - rebias) >> shift
    subnormal = (magnitude.view(torch.float32) + as_float(magic)).view(torch.int32) - magic
    code = torch.where(magnitude < min_normal, subnormal, normal)
    code = torch.where(magnitude < INFINITY, code, inf)
    code = torch.where(magnitude > INFINITY, nan, code)
    return torch.where(bits < 0, code | sign, code)


def numbers_with_row(
    code: torch.Tensor,
    shift: Scalar,
    min_normal: Scalar,
    magic: Scalar,
    rebias: Scalar,
    sign: Scalar,
    largest: Scalar,
    inf: Scalar,
    nan: Scalar,
    last_inf: Scalar,
) -> torch.Tensor:
    """Return the float32 numbers of int32 codes, exactly and without float32 subnormals on the way."""
    magnitude = code & ~sign
    aligned = magnitude << shift
    subnormal = (magnitude + magic).view(torch.float32) - as_float(magic)
    value = torch.where(aligned < 1 << 23, subnormal.view(torch.int32), aligned + rebias)
    value = torch.where(magnitude > largest, INFINITY, value)
    value = torch.where(magnitude > last_inf, QUIET_NAN, value)
    return torch.where(code & sign != 0, value | SIGN, value).view(torch.float32)


def truncate_with_row(
    x: torch.Tensor,
    shift: Scalar,
    addend: Scalar,
    min_normal: Scalar,
    magic: Scalar,
    largest: Scalar,
    overflow: Scalar,
    underflow: Scalar = 0,
) -> torch.Tensor:
    """Round float32 ``x`` toward zero: finite values beyond the largest number become it in every family.

    Inf and NaN follow the nearest rule.
    """
    down, _ = _split(x, shift, min_normal, magic)
    special = x.view(torch.int32) & MAGNITUDE >= INFINITY
    nearest = round_with_row(x, shift, addend, min_normal, magic, largest, overflow, underflow)
    bits = torch.where(down > largest, largest, down) | (x.view(torch.int32) & SIGN)
    return torch.where(special, nearest, bits.view(torch.float32))


def dither_with_row(
    x: torch.Tensor,
    random: torch.Tensor,
    shift: Scalar,
    addend: Scalar,
    min_normal: Scalar,
    magic: Scalar,
    largest: Scalar,
    overflow: Scalar,
    underflow: Scalar = 0,
) -> torch.Tensor:
    """Round float32 ``x`` up in magnitude with probability (|x| - down) / (up - down), else down.

    ``random`` is int32 of the shape of ``x``, uniform in [0, 2^31). The probability is exact wherever it is a
    multiple of 2^-31, which only magnitudes below 2^-7 units of the smallest subnormal miss, by less than 2^-31.
    Beyond the largest number the nearest rule holds.
    """
    down, fraction = _split(x, shift, min_normal, magic)
    stepped = _next_up(down, shift, min_normal, magic)
    bits = torch.where(random < fraction, stepped, down)
    sign = x.view(torch.int32) & SIGN
    nearest = round_with_row(x, shift, addend, min_normal, magic, largest, overflow, underflow)
    beyond = (x.view(torch.int32) & MAGNITUDE) > largest
    return torch.where(beyond, nearest, (bits | sign).view(torch.float32))


def _split(x: torch.Tensor, shift: Scalar, min_normal: Scalar, magic: Scalar) -> tuple[torch.Tensor, torch.Tensor]:
    """Return magnitude bits truncated to the format, and the rest in units of 2^-31 of the last place."""
    magnitude = x.view(torch.int32) & MAGNITUDE
    field = torch.clamp_min(magnitude >> 23, 1)
    significand = magnitude - ((field - 1) << 23)
    dropped = torch.clamp_min((min_normal >> 23) - field, 0) + shift
    kept = significand >> torch.clamp_max(dropped, 31)
    subnormal = ((kept + magic).view(torch.float32) - as_float(magic)).view(torch.int32)
    normal = (kept << shift) + ((field - 1) << 23)
    fine = (significand << torch.clamp_min(31 - dropped, 0)) & MAGNITUDE
    coarse = significand >> torch.clamp(dropped - 31, 0, 31)
    fraction = torch.where(dropped > 31, coarse, fine)
    return torch.where(magnitude < min_normal, subnormal, normal), fraction


def _next_up(down: torch.Tensor, shift: Scalar, min_normal: Scalar, magic: Scalar) -> torch.Tensor:
    """Return the bits of the format's next number above ``down``."""
    anchor = as_float(magic)
    subnormal = (((down.view(torch.float32) + anchor).view(torch.int32) + 1).view(torch.float32) - anchor).view(
        torch.int32
    )
    normal = ((down >> shift) + 1) << shift
    return torch.where(down < min_normal, subnormal, normal)
