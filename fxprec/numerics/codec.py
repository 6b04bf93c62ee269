"""Rounding and packing of float32 tensors, once, over plain pointwise ops.

Every function here can be run eagerly, traced by ``make_fx`` or fused by Inductor: only decomposed pointwise ops,
and few of them, since compile time follows the number of nodes. All work on float32 bits read as int32:
magnitudes are ordered like integers, and NaN lies above infinity. Definitions: ALGORITHMS section 1.

Two layers: a *row* holds a format as eight integers, so that a runtime table can change it without recompiling;
`encode_bits` and `decode_bits` fold one format's constants in.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

import torch

from fxprec.numerics.formats import Format

Scalar: TypeAlias = int | torch.Tensor
"""A Python int, or a 0-dim int32 tensor."""

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
QUIET_NAN = 0x7FC00000
SIGN = -(1 << 31)


class FormatRow(NamedTuple):
    """A format as eight int32 numbers; "bits" are those of a float32."""

    scale_exponent: int
    """0 here: the power of two a site's values are multiplied by, filled in by the scale table."""
    shift: int
    """23 - M: float32 mantissa bits the format lacks."""
    addend: int
    """Half a unit in the last place, less 1 where ``parity`` is 1."""
    min_normal: int
    """Bits of the smallest normal number, plus parity + 1; see `_parity`."""
    magic: int
    """Bits of 2^(min_exponent + shift): adding and subtracting it rounds a subnormal exactly once."""
    largest: int
    """Bits of the largest number."""
    overflow: int
    """Bits of what a larger number becomes: the largest, inf or NaN."""
    underflow: int
    """Bits of the largest magnitude that rounds to zero."""


class RoundStats(NamedTuple):
    """A rounded tensor with what rounding did; counts are 0-dim int32 tensors, ``amax`` is 0-dim float32."""

    rounded: torch.Tensor
    overflow: torch.Tensor
    underflow: torch.Tensor
    amax: torch.Tensor


def float_bits(value: float) -> int:
    """Return the bits of ``value`` as a float32."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def format_row(fmt: Format) -> FormatRow:
    """Return the row of ``fmt``."""
    shift = 23 - fmt.mantissa_bits
    parity = _parity(fmt)
    overflow = {"saturate": float_bits(fmt.largest), "inf": INFINITY, "nan": QUIET_NAN}[str(fmt.overflow)]
    half_smallest = fmt.smallest_subnormal / 2
    return FormatRow(
        scale_exponent=0,
        shift=shift,
        addend=((1 << shift) >> 1) - (parity == 1),
        min_normal=float_bits(fmt.smallest_normal) + parity + 1,
        magic=float_bits(2.0 ** (fmt.min_exponent + shift)),
        largest=float_bits(fmt.largest),
        overflow=overflow,
        underflow=float_bits(half_smallest),  # 2^-150 rounds to 0: no float32 underflows
    )


def _parity(fmt: Format) -> int:
    """How the last kept bit of a float32 enters a tie: 1 added, -1 subtracted, 0 not at all.

    With no mantissa bits that bit is the exponent's last, and an even offset difference makes odd codes even.
    Kept in the low bits of ``min_normal``: the binade above it has the same unit, so either path is right there.
    """
    if fmt.mantissa_bits == 23:
        return 0
    return -1 if fmt.mantissa_bits == 0 and (127 - fmt.offset) % 2 else 1


def as_float(bits: Scalar) -> float | torch.Tensor:
    """Return the float32 of ``bits``."""
    if isinstance(bits, torch.Tensor):
        return bits.view(torch.float32)
    value: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    return value


def round_with_row(
    x: torch.Tensor,
    shift: Scalar,
    addend: Scalar,
    min_normal: Scalar,
    magic: Scalar,
    largest: Scalar,
    overflow: Scalar,
    underflow: Scalar = 0,
) -> torch.Tensor:
    """Round float32 ``x`` to nearest, ties to the even code; columns 1 to 7 of a `FormatRow` name the format.

    Keeps NaN, -0.0 and, for FP32, every bit of every number.
    """
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    parity = (min_normal & 3) - 1
    tie = ((magnitude >> shift) & 1) * parity
    normal = ((magnitude + addend + tie) >> shift) << shift
    anchor = as_float(magic)
    subnormal = ((magnitude.view(torch.float32) + anchor) - anchor).view(torch.int32)
    rounded = torch.where(magnitude < min_normal, subnormal, normal)
    rounded = torch.where(rounded > largest, overflow, rounded)
    rounded = torch.where(magnitude > INFINITY, magnitude, rounded)
    return (rounded | (bits & SIGN)).view(torch.float32)


def overflow_threshold(shift: Scalar, largest: Scalar) -> Scalar:
    """Return the bits from which a magnitude overflows: the largest number plus half a unit (M = 23: plus one)."""
    if isinstance(shift, torch.Tensor):
        return largest + torch.clamp_min((torch.ones_like(shift) << shift) >> 1, 1)
    return largest + max((1 << shift) >> 1, 1)


def round_stats(x: torch.Tensor, row: FormatRow | tuple[Scalar, ...]) -> RoundStats:
    """Round float32 ``x`` with a row of eight, and count what overflows and underflows.

    Overflow: |x| >= largest + half a unit, inf, or NaN. Underflow: non-zero that rounds to zero.
    """
    magnitude = x.view(torch.int32) & MAGNITUDE
    over = magnitude >= overflow_threshold(row[1], row[5])
    under = (magnitude > 0) & (magnitude <= row[7])
    return RoundStats(
        round_with_row(x, *row[1:]),
        over.sum(dtype=torch.int32),
        under.sum(dtype=torch.int32),
        torch.amax(x.abs()) if x.numel() else x.new_zeros(()),
    )


def encode_bits(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the codes of float32 ``x`` rounded to nearest even, in ``fmt.code_dtype``, shape of ``x``.

    NaN becomes the format's NaN code; where it has none, the largest number (statistics count it as overflow).
    """
    native = _exact_cast(fmt)
    if native is not None:
        return x.to(native).view(fmt.code_dtype)
    row = format_row(fmt)
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    code = _magnitude_code(_bounded(magnitude, fmt), fmt, row)
    code = torch.clamp_max(code, fmt.overflow_code)
    if fmt.nan_code is not None:
        code = torch.where(magnitude > INFINITY, fmt.nan_code, code)
    top = fmt.bits - 1
    sign = (bits >> (31 - top)) & (1 << top if top < 31 else SIGN)
    return _narrow(code | sign, fmt.code_dtype)


def _narrow(code: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return code.view(dtype) if dtype == torch.uint32 else code.to(dtype)


def _bounded(magnitude: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Keep the rounding sum of a NaN without a code within int32."""
    wraps = fmt.nan_code is None and fmt.offset >= 127
    return torch.clamp_max(magnitude, INFINITY) if wraps else magnitude


def _magnitude_code(magnitude: torch.Tensor, fmt: Format, row: FormatRow) -> torch.Tensor:
    """Rounded magnitude bits as codes, with no upper end."""
    shift, parity = row.shift, _parity(fmt)
    rebias = (127 - fmt.offset) << 23
    normal = magnitude + (row.addend - rebias)
    if parity:
        last = (magnitude >> shift) & 1
        normal = normal + last if parity > 0 else normal - last
    if shift:
        normal = normal >> shift
    subnormal = (magnitude.view(torch.float32) + as_float(row.magic)).view(torch.int32) - row.magic
    return torch.where(magnitude < row.min_normal, subnormal, normal)


def decode_bits(code: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the numbers of ``fmt.code_dtype`` codes as float32, exactly."""
    native = _exact_cast(fmt)
    if native is not None:
        return code.view(native).to(torch.float32)
    shift, top = 23 - fmt.mantissa_bits, fmt.bits - 1
    wide = code.view(torch.int32) if fmt.code_dtype == torch.uint32 else code.to(torch.int32)
    if top < 31:
        # Sign to bit 31, then copied down over the exponent bits the format lacks, then cleared there.
        wide = ((wide << (31 - top)) >> (8 - fmt.exponent_bits)) & (SIGN | ((1 << top) - 1) << shift)
    # Float32's own subnormals stand for the format's: multiplying by a power of two is exact.
    value = _times_power(wide.view(torch.float32), fmt.min_exponent + 126)
    if fmt.largest_code < (1 << top) - 1:
        infinite = wide & MAGNITUDE > fmt.largest_code << shift
        value = torch.where(infinite, _special(wide, fmt), value)
    return value


def _times_power(value: torch.Tensor, exponent: int) -> torch.Tensor:
    while exponent > 127:  # a scale beyond float32: formats whose smallest normal number is above 2
        value, exponent = value * 2.0**127, exponent - 127
    return value * 2.0**exponent if exponent else value


def _special(wide: torch.Tensor, fmt: Format) -> torch.Tensor | float:
    """What a code above the largest number means: its mantissa stays for IEEE's NaNs."""
    if fmt.specials == "fn":
        return torch.nan
    kept = wide if fmt.specials == "ieee" else wide & SIGN
    return (kept | INFINITY).view(torch.float32)


def _exact_cast(fmt: Format) -> torch.dtype | None:
    """The native dtype, if its cast rounds and overflows as the format on every device; 8-bit casts do not."""
    return fmt.torch_dtype if fmt.bits > 8 and fmt.overflow == "inf" else None
