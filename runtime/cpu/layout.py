"""Implement ``fxprec::laid_out`` on CPUs."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from fxprec.kernels.layout import LAID_OUT_DTYPES, LaidOut
from fxprec.numerics import native

_FORMATS = {True: torch.channels_last, False: torch.contiguous_format}


@cache
def _library() -> ctypes.CDLL:
    memory, size = ctypes.c_void_p, ctypes.c_int64
    widths = [8 * dtype.itemsize for dtype in LAID_OUT_DTYPES]
    signatures = {f"fxprec_turn_{a}_{b}": (None, memory, memory, size, size, size) for a in widths for b in widths}
    return native.load(native.text_beside(__file__, "layout.cpp"), signatures)


def laid_out(x: torch.Tensor, dtype: torch.dtype, channels_last: bool) -> torch.Tensor:
    """Return ``x`` (n, channels, height, width) as ``dtype``, channels-last or contiguous.

    A compiled kernel converts one of these layouts into the other, for float32 and bfloat16. torch copies all else.
    """
    native.check_readable("x", x, dim=4)
    y = torch.empty(x.shape, dtype=dtype, device=x.device, memory_format=_FORMATS[channels_last])
    if not {x.dtype, dtype} <= LAID_OUT_DTYPES or not x.is_contiguous(memory_format=_FORMATS[not channels_last]):
        return y.copy_(x)
    count, batch, channels = x.numel(), x.shape[0], x.shape[1]
    x_at, y_at = native.address("x", x, x.dtype, count), native.address("y", y, dtype, count)
    pixels = x.shape[2] * x.shape[3]
    rows, columns = (channels, pixels) if channels_last else (pixels, channels)
    turn = getattr(_library(), f"fxprec_turn_{8 * x.itemsize}_{8 * y.itemsize}")
    turn(x_at, y_at, batch, rows, columns)
    return y


LaidOut.implement(laid_out, "CPU")
