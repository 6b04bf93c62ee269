"""The CPU implementations of ``fxprec::store``, ``fxprec::round`` and ``fxprec::load``.

The kernels are plain loops over dense memory, compiled once by Inductor's own C++ builder (its compiler, flags and
disk cache). Strides are kept, so channels-last tensors stay so.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch._inductor.codecache import CppCodeCache

from fxprec.formats import Format, parse
from fxprec.runtime.cpu.params import Params, params_of, params_of_row
from fxprec.symbolic import stored_dtype

_SOURCE = Path(__file__).with_name("kernels.cpp")


@cache
def _library() -> ctypes.CDLL:
    return CppCodeCache.load(_SOURCE.read_text(encoding="utf-8"), device_type="cpu")  # type: ignore[no-any-return]


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def _dense(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` as a tensor whose memory can be walked front to back."""
    x = x.to(dtype)
    return x if torch.ops.aten.is_non_overlapping_and_dense(x) else x.contiguous()


def _scale_exp(table: torch.Tensor, site: int) -> int:
    return int(table[site, 0])


def store(
    x: torch.Tensor, table: torch.Tensor, site: int, format: str, storage: str, value: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes, rounded float32 values or an empty tensor, statistics (3,) float32)."""
    fmt = parse(format)
    x = _dense(x, torch.float32)
    codes = torch.empty_like(x, dtype=stored_dtype(fmt, storage))
    values = torch.empty_like(x) if value else None
    stats = torch.empty(3)
    function = _library().fxprec_store8 if fmt.bits <= 8 else _library().fxprec_store16
    params = params_of(fmt, _scale_exp(table, site))
    function(_pointer(x), _pointer(codes), _pointer(values), _pointer(stats), _count(x), ctypes.byref(params))
    return codes, x.new_empty(0) if values is None else values, stats


def round_values(
    x: torch.Tensor, table: torch.Tensor, site: int, format: str, storage: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rounded float32 values, statistics); in ``simulate`` the table's row is the format."""
    x = _dense(x, torch.float32)
    values, stats = torch.empty_like(x), torch.empty(3)
    params = _round_params(table, site, parse(format), storage)
    _library().fxprec_round(_pointer(x), _pointer(values), _pointer(stats), _count(x), ctypes.byref(params))
    return values, stats


def _round_params(table: torch.Tensor, site: int, fmt: Format, storage: str) -> Params:
    if storage != "simulate":
        return params_of(fmt, _scale_exp(table, site))
    return params_of_row(table[site].tolist())


def load(q: torch.Tensor, table: torch.Tensor, site: int, format: str) -> torch.Tensor:
    """Return the float32 values of stored codes, the scale undone."""
    fmt = parse(format)
    q = _dense(q, q.dtype)
    values = torch.empty_like(q, dtype=torch.float32)
    function = _library().fxprec_load8 if fmt.bits <= 8 else _library().fxprec_load16
    function(_pointer(q), _pointer(values), _count(q), ctypes.byref(params_of(fmt, _scale_exp(table, site))))
    return values


def _count(x: torch.Tensor) -> ctypes.c_int64:
    return ctypes.c_int64(x.numel())


torch.library.impl("fxprec::store", "CPU", store)
torch.library.impl("fxprec::round", "CPU", round_values)
torch.library.impl("fxprec::load", "CPU", load)
