"""Round and pack float32 numbers: the one definition from which the code of every kernel is derived.

The functions are pointwise torch operators on float32 bits read as int32, where magnitudes are ordered like integers
and NaN lies above infinity. Called directly, they run eagerly. Traced by ``make_fx``, they are Inductor's expansion.
Printed (`cpp`, `device`), they are the C++ and Triton functions that kernels call. The fields of a row are tensors or
Python ints. With tensors, a table or a struct changes the format without recompiling; ints fold into the code.
Definitions: docs/algorithms.md, "Number formats". `reference` decides in doubt, and shares no code with this module.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fxprec.numerics.formats import Format
from fxprec.numerics.rows import (
    INFINITY,
    MAGNITUDE,
    QUIET_NAN,
    SIGN,
    CodeRow,
    FormatRow,
    Scalar,
    as_float,
    code_row,
    format_row,
    thresholds,
)


class _Rounded(NamedTuple):
    """A magnitude rounded to nearest even, without an upper limit."""

    units: Tensor
    """int32, of a normal number: float32 bits without the mantissa bits the format lacks."""
    anchored: Tensor
    """float32, of a subnormal: the rounded number plus the format's magic number."""


def _nearest_even(magnitude: Tensor, row: FormatRow[Scalar], rebias: Scalar = 0) -> _Rounded:
    """Round magnitude bits to nearest, ties to the even code. ``rebias`` is subtracted from the units' exponent.

    For a normal number, add half a unit below the kept bits, less a correction that keeps ties even, and cut those bits
    off. For a subnormal, add a magnitude whose float32 unit is the format's smallest number, so that float32 rounds it.
    """
    units = _plus(magnitude, row.addend if _is(rebias, 0) else row.addend - rebias)
    if not isinstance(row.parity, int) or row.parity != 0:
        last = _shifted(magnitude, row.shift) & 1
        units = units - last if _is(row.parity, -1) else units + (last if _is(row.parity, 1) else last * row.parity)
    anchored = magnitude.view(torch.float32) + as_float(row.magic)
    return _Rounded(_shifted(units, row.shift), anchored)


def _is(scalar: object, value: int) -> bool:
    return isinstance(scalar, int) and scalar == value


def _plus(x: Tensor, scalar: Tensor | int) -> Tensor:
    return x if _is(scalar, 0) else x + scalar


def _shifted(x: Tensor, scalar: Tensor | int) -> Tensor:
    return x if _is(scalar, 0) else x >> scalar


def nearest(x: Tensor, row: FormatRow[Scalar]) -> Tensor:
    """Return float32 ``x`` rounded to nearest, ties to the even code.

    NaN and -0.0 stay as they are, and in FP32 every bit of every number.
    """
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    return _number(_nearest_even(magnitude, row), bits, magnitude, row)


def nearest_finite(x: Tensor, row: FormatRow[Scalar]) -> Tensor:
    """Round as `nearest` where there is no inf or NaN, in a saturating format with mantissa bits (``parity`` 1)."""
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    row = row._replace(parity=1)
    found = _unbounded(_nearest_even(magnitude, row), magnitude, row)
    return (torch.where(found > row.largest, row.largest, found) | (bits & SIGN)).view(torch.float32)


def _unbounded(rounded: _Rounded, magnitude: Tensor, row: FormatRow[Scalar]) -> Tensor:
    normal = rounded.units if _is(row.shift, 0) else rounded.units << row.shift
    subnormal = (rounded.anchored - as_float(row.magic)).view(torch.int32)
    return torch.where(magnitude < row.min_normal, subnormal, normal)


def _number(rounded: _Rounded, bits: Tensor, magnitude: Tensor, row: FormatRow[Scalar]) -> Tensor:
    found = _unbounded(rounded, magnitude, row)
    found = torch.where(found > row.largest, row.overflow, found)
    found = torch.where(magnitude > INFINITY, magnitude, found)
    return (found | (bits & SIGN)).view(torch.float32)


def codes(x: Tensor, row: FormatRow[Scalar], code: CodeRow[Scalar]) -> Tensor:
    """Return the int32 codes of float32 ``x`` rounded to nearest even; a NaN without a code becomes the largest."""
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    found = _code(_nearest_even(magnitude, row, code.rebias), magnitude, row, code)
    return torch.where(magnitude > INFINITY, code.nan_code, found) | _code_sign(bits, code)


def _code(rounded: _Rounded, magnitude: Tensor, row: FormatRow[Scalar], code: CodeRow[Scalar]) -> Tensor:
    subnormal = rounded.anchored.view(torch.int32) - row.magic
    found = torch.where(magnitude < row.min_normal, subnormal, rounded.units)
    return torch.clamp_max(found, code.overflow_code)


def _code_sign(bits: Tensor, code: CodeRow[Scalar]) -> Tensor:
    return _shifted(bits, code.sign_shift) & code.sign


def stored(x: Tensor, row: FormatRow[Scalar], code: CodeRow[Scalar]) -> tuple[Tensor, Tensor]:
    """Return `codes` and `nearest` of float32 ``x``, rounded once for both."""
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    rounded = _nearest_even(magnitude, row)
    shifted = rounded._replace(units=rounded.units - (code.rebias >> row.shift))
    found = torch.where(magnitude > INFINITY, code.nan_code, _code(shifted, magnitude, row, code))
    return found | _code_sign(bits, code), _number(rounded, bits, magnitude, row)


def numbers(code: Tensor, row: FormatRow[Scalar], codes: CodeRow[Scalar]) -> Tensor:
    """Return the float32 numbers of int32 codes, exactly and without float32 subnormals in between."""
    magnitude = code & codes.mask
    aligned = magnitude << row.shift
    subnormal = (magnitude + row.magic).view(torch.float32) - as_float(row.magic)
    value: Tensor = torch.where(aligned < 1 << 23, subnormal.view(torch.int32), aligned + codes.rebias)
    value = torch.where(magnitude > codes.largest_code, INFINITY, value)
    value = torch.where(magnitude > codes.last_inf, QUIET_NAN, value)
    sign: Tensor = (code << codes.sign_shift) & SIGN
    return (value | sign).view(torch.float32)


def lost(magnitude: Tensor, row: FormatRow[Scalar]) -> tuple[Tensor, Tensor]:
    """Return which magnitudes overflow (|x| >= largest + half a unit, inf, NaN) and which round to zero."""
    limits = thresholds(row)
    return magnitude >= limits.overflow, (magnitude > 0) & (magnitude <= limits.underflow)


# The functions below, for Inductor and Triton, fold one format's constants in and use what only a known format allows.


def encode_bits(x: Tensor, fmt: Format) -> Tensor:
    """Return the codes of float32 ``x`` rounded to nearest even, in ``fmt.code_dtype``, shape of ``x``.

    NaN becomes the format's NaN code; if there is none, the largest number (statistics count it as overflow).
    """
    native = _exact_cast(fmt)
    if native is not None:
        return x.to(native).view(fmt.code_dtype)
    code = folded_codes(x, fmt)
    return code.view(fmt.code_dtype) if fmt.code_dtype == torch.uint32 else code.to(fmt.code_dtype)


def folded_codes(x: Tensor, fmt: Format, kept: int | None = None) -> Tensor:
    """Return the `codes` of one format. NaN without a code saturates as other numbers do, without a comparison.

    ``kept`` is the code for infinity, also if the format saturates (`kept_codes`).
    """
    row, code = format_row(fmt), code_row(fmt)
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    bounded = magnitude
    if fmt.nan_code is None and fmt.offset >= 127:
        bounded = torch.clamp_max(magnitude, INFINITY)  # the sum in the rounding stays an int32
    found = _code(_nearest_even(bounded, row, code.rebias), bounded, row, code)
    if kept is not None:
        found = torch.where(magnitude >= INFINITY, kept, found)
    if fmt.nan_code is not None:
        found = torch.where(magnitude > INFINITY, fmt.nan_code, found)
    return found | _code_sign(bits, code)


def decode_bits(code: Tensor, fmt: Format) -> Tensor:
    """Return the numbers of ``fmt.code_dtype`` codes as float32, exactly."""
    native = _exact_cast(fmt)
    if native is not None:
        return code.view(native).to(torch.float32)
    return folded_numbers(code.view(torch.int32) if fmt.code_dtype == torch.uint32 else code.to(torch.int32), fmt)


def folded_numbers(code: Tensor, fmt: Format) -> Tensor:
    """Return the `numbers` of one format, from int32 codes whose upper bits are ignored.

    The format's subnormals are read as float32's subnormals; multiplying these by a power of two is exact.
    """
    shift, top = 23 - fmt.mantissa_bits, fmt.bits - 1
    wide = code
    if top < 31:
        # Shift the sign to bit 31, copy it down over the exponent bits that the format lacks, then clear it there.
        wide = _shifted(code << (31 - top), 8 - fmt.exponent_bits) & (SIGN | ((1 << top) - 1) << shift)
    value = _times_power(wide.view(torch.float32), fmt.min_exponent + 126)
    if fmt.largest_code < (1 << top) - 1:
        infinite = wide & MAGNITUDE > fmt.largest_code << shift
        value = torch.where(infinite, _special(wide, fmt), value)
    return value


def _times_power(value: Tensor, exponent: int) -> Tensor:
    while exponent > 127:  # a scale beyond float32: formats whose smallest normal number is above 2
        value, exponent = value * 2.0**127, exponent - 127
    return value * 2.0**exponent if exponent else value


def _special(wide: Tensor, fmt: Format) -> Tensor | float:
    """Return the value of a code above the largest number; IEEE's NaNs keep their mantissa."""
    if fmt.specials == "fn":
        return torch.nan
    kept = wide if fmt.specials == "ieee" else wide & SIGN
    return (kept | INFINITY).view(torch.float32)


def _exact_cast(fmt: Format) -> torch.dtype | None:
    """Return the native dtype if its cast rounds and overflows like the format on every device; no 8-bit cast does."""
    return fmt.torch_dtype if fmt.bits > 8 and fmt.overflow == "inf" else None
