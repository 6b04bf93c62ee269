"""A number format as a few integers, which a kernel reads from a table, a struct or a compile-time tuple.

`FormatRow` has the numbers for rounding, `CodeRow` those for encoding and decoding. Every kernel uses these
names in this order: C++ as a struct, Triton as a tuple or from the scale table, eager torch as the tuple itself.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch

from fxprec.numerics.formats import Format

Scalar: TypeAlias = torch.Tensor | int
"""An ``int``, which folds into the code, or a 0-dim int32 tensor."""
S = TypeVar("S", covariant=True)

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
QUIET_NAN = 0x7FC00000
SIGN = -(1 << 31)


class FormatRow(NamedTuple, Generic[S]):
    """A format as int32 numbers. "Bits" in the fields below are the bits of a float32."""

    scale_exponent: S
    """Power of two that multiplies a site's values; 0 here, set in the scale table."""
    shift: S
    """23 - M: the float32 mantissa bits that the format lacks."""
    addend: S
    """Half a unit in the last place, less 1 where ``parity`` is 1."""
    parity: S
    """How the last kept bit of a float32 enters a tie: 1 added, -1 subtracted, 0 not at all."""
    min_normal: S
    """Bits of the smallest normal number."""
    magic: S
    """Bits of 2^(min_exponent + shift): adding and subtracting this number rounds a subnormal exactly once."""
    largest: S
    """Bits of the largest number."""
    overflow: S
    """Bits of the result for a larger number: the largest, inf or NaN."""
    underflow: S
    """Bits of the largest magnitude that rounds to zero."""


class CodeRow(NamedTuple, Generic[S]):
    """The int32 numbers of a format that encoding and decoding need beside its `FormatRow`."""

    rebias: S
    """float32 bits of 2^(-B): the difference of the two exponent codes, in place."""
    sign_shift: S
    """Distance from float32's sign bit down to the code's."""
    sign: S
    """The code's sign bit; for 32 bits, int32's own."""
    mask: S
    """All bits of a code but its sign."""
    largest_code: S
    """Magnitude bits of the largest number."""
    overflow_code: S
    """Magnitude bits of the code for an overflow, infinity included."""
    nan_code: S
    """Magnitude bits of NaN; the largest number's in formats without one."""
    last_inf: S
    """Magnitude bits above ``largest_code`` up to this number read as inf, larger ones as NaN."""


def float_bits(value: float) -> int:
    """Return the bits of ``value`` as a float32."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def as_float(bits: object) -> Any:
    """Return the float32 of ``bits``: a float for an int, a tensor for a tensor."""
    if isinstance(bits, torch.Tensor):
        return bits.view(torch.float32)
    return struct.unpack("<f", struct.pack("<i", bits))[0]


def format_row(fmt: Format) -> FormatRow[int]:
    """Return the row of ``fmt``."""
    shift, parity = 23 - fmt.mantissa_bits, _parity(fmt)
    overflow = {"saturate": float_bits(fmt.largest), "inf": INFINITY, "nan": QUIET_NAN}[str(fmt.overflow)]
    return FormatRow(
        scale_exponent=0,
        shift=shift,
        addend=((1 << shift) >> 1) - (parity == 1),
        parity=parity,
        min_normal=float_bits(fmt.smallest_normal),
        magic=float_bits(2.0 ** (fmt.min_exponent + shift)),
        largest=float_bits(fmt.largest),
        overflow=overflow,
        underflow=float_bits(fmt.smallest_subnormal / 2),  # 2^-150 rounds to 0: no float32 underflows
    )


def _parity(fmt: Format) -> int:
    """Return ``parity``. Without mantissa bits the last kept bit is the exponent's; it may be odd for an even code."""
    if fmt.mantissa_bits == 23:
        return 0
    return -1 if fmt.mantissa_bits == 0 and (127 - fmt.offset) % 2 else 1


def code_row(fmt: Format) -> CodeRow[int]:
    """Return the code row of ``fmt``."""
    every = (1 << (fmt.bits - 1)) - 1
    return CodeRow(
        rebias=(127 - fmt.offset) << 23,
        sign_shift=32 - fmt.bits,
        sign=1 << (fmt.bits - 1) if fmt.bits < 32 else SIGN,
        mask=every,
        largest_code=fmt.largest_code,
        overflow_code=fmt.overflow_code,
        nan_code=fmt.largest_code if fmt.nan_code is None else fmt.nan_code,
        last_inf={"none": every, "ieee": fmt.largest_code + 1, "fn": fmt.largest_code}[fmt.specials],
    )


class Thresholds(NamedTuple, Generic[S]):
    """The magnitudes, as float32 bits, beyond which rounding loses a number."""

    overflow: S
    """The smallest that overflows: the largest number plus half a unit in the last place (M = 23: plus one bit)."""
    underflow: S
    """The largest that rounds to zero."""


def thresholds(row: FormatRow[S]) -> Thresholds[S]:
    """Return the magnitudes that statistics compare with."""
    shift: Any = row.shift
    half: Any = ((torch.ones_like(shift) if isinstance(shift, torch.Tensor) else 1) << shift) >> 1
    half = torch.clamp_min(half, 1) if isinstance(half, torch.Tensor) else max(half, 1)
    return Thresholds(row.largest + half, row.underflow)


def row_of(columns: Sequence[S]) -> FormatRow[S]:
    """Return a `FormatRow` from the first columns of a row of the scale table."""
    return FormatRow(*columns[: len(FormatRow._fields)])
