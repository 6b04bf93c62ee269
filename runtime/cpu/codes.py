"""Count statistics of stored tensors from their codes, if the loop that stored them counted nothing.

A number counts as overflow if its code is that of an overflow: inf, NaN, or the largest number of a format that
saturates. Numbers within half a unit below the largest number have that code too. The largest magnitude is that of the
largest code, without the scale with which it was stored. Codes do not show which numbers were rounded to zero.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from fxprec.numerics import cpp, native
from fxprec.numerics.formats import Format
from fxprec.numerics.stats import WIDTH


@cache
def _library() -> ctypes.CDLL:
    pointer = ctypes.c_void_p
    signatures = {"fxprec_count_codes": (None, pointer, ctypes.c_int64, pointer)}
    return native.load(cpp.with_codec(native.text_beside(__file__, "codes.cpp")), signatures)


def count_codes(stored: Sequence[torch.Tensor], formats: Sequence[Format], exps: Sequence[int]) -> torch.Tensor:
    """Return the `Counts` of tensors stored in 8 or 16 bits, one row after another, float64.

    ``exps`` are the exponents of the scales with which they are stored.
    """
    fields = []
    for q, fmt, exp in zip(stored, formats, exps, strict=True):
        count, (form, width) = q.numel(), _form(fmt)
        assert q.itemsize == width, f"{q.dtype} holds no codes of {fmt.name}"
        fields += [native.address("codes", q, q.dtype, count), count, form, width, exp]
    rows = torch.empty(len(stored) * WIDTH, dtype=torch.float64, device="cpu")
    _library().fxprec_count_codes((ctypes.c_int64 * len(fields))(*fields), len(stored), rows.data_ptr())
    return rows


_structs: dict[Format, cpp.CFormat] = {}  # kept here, because C++ reads them by address


@cache
def _form(fmt: Format) -> tuple[int, int]:
    """Return the address of the format's struct, and the bytes of a code."""
    struct = _structs.setdefault(fmt, cpp.c_format(fmt))
    return ctypes.addressof(struct), fmt.code_dtype.itemsize
