"""Device functions between float32 and codes of any `Format`, in integers: the bits of `fxprec.numerics.codec`.

No native conversion is used, so sm_80 and the interpreter (whose own float8 cast is not to nearest) give the same
codes as newer devices. A format reaches a kernel as a tuple of compile-time constants.
"""

from __future__ import annotations

from typing import TypeAlias

import triton
import triton.language as tl

from fxprec.numerics.codec import as_float, format_row
from fxprec.numerics.formats import Format

Constants: TypeAlias = tuple[int | float, ...]


def constants(fmt: Format, *, keep: bool = False) -> Constants:
    """Return what `encode` and `decode` need of a format of at most 16 bits.

    With ``keep`` inf and NaN become the format's codes of them even where it saturates; it must have such codes.
    """
    assert fmt.bits <= 16, "32-bit codes save nothing"
    row = format_row(fmt)
    parity = (row.min_normal & 3) - 1
    magic = as_float(row.magic)
    assert isinstance(magic, float)
    shift, top = row.shift, fmt.bits - 1
    largest_nan = fmt.largest_code if fmt.nan_code is None else fmt.nan_code
    first, second = _factors(fmt.min_exponent + 126)
    special = {"none": 0, "fn": 1, "ieee": 2}[fmt.specials] if fmt.largest_code < (1 << top) - 1 else -1
    return (
        shift,  # 0
        row.addend - ((127 - fmt.offset) << 23),  # 1
        parity,  # 2
        row.min_normal,  # 3
        magic,  # 4
        row.magic,  # 5
        fmt.overflow_code,  # 6
        largest_nan,  # 7
        top,  # 8
        8 - fmt.exponent_bits,  # 9
        -(1 << 31) | ((1 << top) - 1) << shift,  # 10
        first,  # 11
        second,  # 12
        special,  # 13
        fmt.largest_code << shift,  # 14
        _kept_inf(fmt) if keep else -1,  # 15
    )


def _factors(exponent: int) -> tuple[float, float]:
    """Write a power of two as a product of two float32."""
    first = min(exponent, 127)
    return 2.0**first, 2.0 ** (exponent - first)


def _kept_inf(fmt: Format) -> int:
    assert fmt.nan_code is not None, f"{fmt.name} has no code for inf"
    return fmt.largest_code + 1 if fmt.specials == "ieee" else fmt.nan_code


def can_keep(fmt: Format) -> bool:
    """Say whether a format has a code that is no number, for a gradient's inf and NaN."""
    return fmt.nan_code is not None


@triton.jit
def encode(x, F: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 codes of float32, to nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    bounded = tl.minimum(magnitude, 0x7F800000)
    normal = (bounded + F[1] + ((bounded >> F[0]) & 1) * F[2]) >> F[0]
    subnormal = (bounded.to(tl.float32, bitcast=True) + F[4]).to(tl.int32, bitcast=True) - F[5]
    code = tl.where(bounded < F[3], subnormal, normal)
    code = tl.minimum(code, F[6])
    if F[15] >= 0:
        code = tl.where(magnitude >= 0x7F800000, F[15], code)
    code = tl.where(magnitude > 0x7F800000, F[7], code)
    return code | ((bits >> (31 - F[8])) & (1 << F[8]))


@triton.jit
def decode(code, F: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 numbers of int32 codes, exactly."""
    wide = ((code << (31 - F[8])) >> F[9]) & F[10]
    value = wide.to(tl.float32, bitcast=True) * F[11]
    if F[12] != 1.0:
        value = value * F[12]
    if F[13] >= 0:
        if F[13] == 1:
            special = tl.full(code.shape, 0x7FC00000, tl.int32)
        elif F[13] == 2:
            special = wide | 0x7F800000
        else:
            special = (wide & -0x80000000) | 0x7F800000
        value = tl.where((wide & 0x7FFFFFFF) > F[14], special.to(tl.float32, bitcast=True), value)
    return value


@triton.jit
def power(exponent):  # type: ignore[no-untyped-def]
    """``2.0 ** exponent`` as float32 of an int32 in -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
