"""What the CPU kernels need to know of a format: the C struct of ``kernels.cpp``."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache

from fxprec.formats import Format

_NEVER = 0x7FFFFFFF  # no magnitude of a 16-bit code reaches it


class Params(ctypes.Structure):
    """Mirrors ``struct Params``."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "shift", "half", "odd_mask", "min_normal", "magic", "largest", "over", "over_from", "under_to",
            "code_adjust", "over_code", "nan_code", "sign_shift", "inf_code", "nan_from",
        )),
        ("quantum", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("unscale", ctypes.c_float),
    )  # fmt: skip


def float_bits(x: float) -> int:
    """Return the float32 bits of ``x``."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def row_of(fmt: Format) -> tuple[int, ...]:
    """Return the format's columns 1 to 7 of the scale table: what rounding in float32 carriers needs.

    (shift, half, smallest normal, magic, largest, overflow, underflow): see `Params`; all but the first two are
    float32 bits. ``underflow`` is the largest magnitude that rounds to zero.
    """
    shift = 23 - fmt.mantissa_bits
    half_quantum = fmt.smallest_subnormal / 2
    return (
        shift,
        max((1 << shift >> 1) - 1, 0),
        float_bits(fmt.smallest_normal),
        float_bits(2.0 ** (fmt.min_exponent - fmt.mantissa_bits + 23)),
        float_bits(fmt.largest),
        {"saturate": float_bits(fmt.largest), "inf": 0x7F800000, "nan": 0x7FC00000}[str(fmt.overflow)],
        float_bits(half_quantum) if half_quantum >= 2.0**-149 else 0,
    )


def params_of_row(row: Sequence[int], scale_exp: int) -> Params:
    """Return what `fxprec_round` needs, from a row of the scale table."""
    shift, half, min_normal, magic, largest, over, under = row
    return Params(
        shift=shift,
        half=half,
        odd_mask=int(shift > 0),
        min_normal=min_normal,
        magic=magic,
        largest=largest,
        over=over,
        over_from=largest + max(1 << shift >> 1, 1),
        under_to=under,
        code_adjust=((min_normal >> 23) - 1) << (23 - shift),
        scale=2.0**scale_exp,
        unscale=2.0**-scale_exp,
    )


@lru_cache(maxsize=4096)
def params_of(fmt: Format, scale_exp: int) -> Params:
    """Return what the packing kernels need for ``fmt`` and a scale of ``2**scale_exp``."""
    params = params_of_row(row_of(fmt), scale_exp)
    ieee = fmt.specials == "ieee"
    nan = fmt.nan_code
    params.over_code = fmt.overflow_code
    params.nan_code = fmt.largest_code if nan is None else nan
    params.sign_shift = 32 - fmt.bits
    params.inf_code = (((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits) if ieee else -1
    params.nan_from = params.inf_code + 1 if ieee else (_NEVER if nan is None else nan)
    params.quantum = fmt.smallest_subnormal
    return params
