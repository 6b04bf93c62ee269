"""What the CPU kernels need to know of a format: the C struct of ``kernels.cpp``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

from fxprec.numerics.codec import INFINITY, format_row, overflow_threshold
from fxprec.numerics.formats import Format

_NEVER = 0x7FFFFFFF  # no magnitude of a 16-bit code reaches it


class Params(ctypes.Structure):
    """Mirrors ``struct Params``."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "shift", "addend", "parity", "min_normal", "magic", "largest", "over", "over_from", "under_to",
            "code_adjust", "over_code", "nan_code", "sign_shift", "inf_code", "nan_from",
            "infinity",
        )),
        ("quantum", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("unscale", ctypes.c_float),
    )  # fmt: skip


def params_of_row(row: Sequence[int], *, unscale_exp: int = 0, keep: bool = False) -> Params:
    """Return what ``fxprec_round`` needs, from the first columns of a row of the scale table (`codec.FormatRow`).

    ``unscale_exp`` is the exponent taken off what is loaded, or off the statistics of what is stored. ``keep`` keeps
    infinities among the values, whatever the format makes of them.
    """
    scale_exp, shift, addend, min_normal, magic, largest, overflow, underflow = row
    return Params(
        shift=shift,
        addend=addend,
        parity=(min_normal & 3) - 1,
        min_normal=min_normal,
        magic=magic,
        largest=largest,
        over=overflow,
        infinity=INFINITY if keep else overflow,
        over_from=overflow_threshold(shift, largest),
        under_to=underflow,
        scale=2.0**scale_exp,
        unscale=2.0**-unscale_exp,
    )


@lru_cache(maxsize=4096)
def params_of(fmt: Format, scale_exp: int = 0, unscale_exp: int = 0, keep: bool = False) -> Params:
    """Return what the packing kernels need for ``fmt``; see `params_of_row`."""
    params = params_of_row((scale_exp, *format_row(fmt)[1:]), unscale_exp=unscale_exp, keep=keep)
    ieee = fmt.specials == "ieee"
    nan = fmt.nan_code
    params.code_adjust = (fmt.min_exponent - 1 + 127) << fmt.mantissa_bits
    params.over_code = fmt.overflow_code
    params.nan_code = fmt.largest_code if nan is None else nan
    params.sign_shift = 32 - fmt.bits
    params.inf_code = (((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits) if ieee else -1
    params.nan_from = params.inf_code + 1 if ieee else (_NEVER if nan is None else nan)
    params.quantum = fmt.smallest_subnormal
    return params
