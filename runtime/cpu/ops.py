"""The CPU implementations of ``fxprec::store``, ``fxprec::round`` and ``fxprec::load``.

The kernels are plain loops over dense memory, compiled once by Inductor's own C++ builder (its compiler, flags and
disk cache). Strides are kept, so channels-last tensors stay so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from fxprec.formats import Format, parse
from fxprec.memory import empty_like
from fxprec.runtime import native
from fxprec.runtime.cpu.measure import wanted_moments, with_moments
from fxprec.runtime.cpu.params import params_of, params_of_row
from fxprec.symbolic import AS_STORED, CARRIED, STATS, stored_dtype

_SOURCE = Path(__file__).with_name("kernels.cpp")


@cache
def _library() -> ctypes.CDLL:
    return native.load(_SOURCE.read_text(encoding="utf-8"))


def _kernel(name: str, fmt: Format) -> Callable[..., None]:
    """Return the kernel for codes of the format's width: 8, 16 or 32 bits."""
    return getattr(_library(), f"fxprec_{name}{8 * fmt.code_dtype.itemsize}")  # type: ignore[no-any-return]


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def _dense(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` as a tensor whose memory can be walked front to back, with the strides its fake result promises."""
    if torch.ops.aten.is_non_overlapping_and_dense(x):
        return x.to(dtype)
    return torch.empty_like(x, dtype=dtype).copy_(x)


def _need_dense(x: torch.Tensor) -> None:
    assert x.dtype == torch.float32, "lowering overwrites nothing else"
    assert torch.ops.aten.is_non_overlapping_and_dense(x), "lowering overwrites nothing else"


def store(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, value: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes, rounded float32 values or an empty tensor, statistics (7,) float32).

    The values keep the scale they are stored with; ``keep`` keeps infinities among them.
    """
    x = _dense(x, torch.float32)
    values = empty_like(x, x.dtype) if value else None
    codes, stats = _store(x, values, table, row, parse(format), storage, keep)
    return codes, x.new_empty(0) if values is None else values, stats


def store_(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`store`, the rounded values written over dense float32 ``x``."""
    _need_dense(x)
    return _store(x, x, table, row, parse(format), storage, keep)


def _store(
    x: torch.Tensor, values: torch.Tensor | None, table: torch.Tensor, row: int, fmt: Format, storage: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    entries = table[row].tolist()
    moments = wanted_moments(x, entries)  # first: x may be overwritten
    codes, stats = empty_like(x, stored_dtype(fmt, storage)), torch.empty(len(STATS))
    function = _kernel("store", fmt)
    params = params_of(fmt, entries[0], entries[CARRIED], keep)
    function(_pointer(x), _pointer(codes), _pointer(values), _pointer(stats), _count(x), ctypes.byref(params))
    return codes, with_moments(stats, moments)


def round_values(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rounded float32 values, statistics); in ``simulate`` the table's row is the format."""
    x = _dense(x, torch.float32)
    values = empty_like(x, x.dtype)
    return values, _round(x, values, table, row, parse(format), storage, keep)


def round_(x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool) -> torch.Tensor:
    """`round_values` over dense float32 ``x``; returns the statistics."""
    _need_dense(x)
    return _round(x, x, table, row, parse(format), storage, keep)


def _round(
    x: torch.Tensor, values: torch.Tensor, table: torch.Tensor, row: int, fmt: Format, storage: str, keep: bool
) -> torch.Tensor:
    entries = table[row].tolist()
    moments = wanted_moments(x, entries)
    stats = torch.empty(len(STATS))
    if storage == "simulate":
        params = params_of_row(entries[:CARRIED], unscale_exp=entries[CARRIED], keep=keep)
    else:
        params = params_of(fmt, entries[0], entries[CARRIED], keep)
    _library().fxprec_round(_pointer(x), _pointer(values), _pointer(stats), _count(x), ctypes.byref(params))
    return with_moments(stats, moments)


def load(q: torch.Tensor, table: torch.Tensor, row: int, format: str) -> torch.Tensor:
    """Return the float32 values of stored codes, less the row's scale exponent."""
    fmt = parse(format)
    q = _dense(q, q.dtype)
    values = empty_like(q, torch.float32)
    function = _kernel("load", fmt)
    scale_exp = 0 if row == AS_STORED else int(table[row, 0])
    function(_pointer(q), _pointer(values), _count(q), ctypes.byref(params_of(fmt, unscale_exp=scale_exp)))
    return values


def _count(x: torch.Tensor) -> ctypes.c_int64:
    return ctypes.c_int64(x.numel())


torch.library.impl("fxprec::store", "CPU", store)
torch.library.impl("fxprec::round", "CPU", round_values)
torch.library.impl("fxprec::store_", "CPU", store_)
torch.library.impl("fxprec::round_", "CPU", round_)
torch.library.impl("fxprec::load", "CPU", load)
