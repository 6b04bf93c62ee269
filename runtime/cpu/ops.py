"""Implement ``fxprec::store``, ``fxprec::round`` and ``fxprec::load`` on CPUs.

The kernels are plain loops over dense memory, compiled once by Inductor's own C++ builder (its compiler, flags and
disk cache). Strides are kept, so channels-last tensors stay channels-last.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch

from fxprec.ir.symbolic import AS_STORED, CARRIED, TABLE_COLUMNS, stored_dtype
from fxprec.kernels.casts import Load, Round, RoundOver, Store, StoreOver
from fxprec.numerics import native
from fxprec.numerics.cpp import CFormat, c_format, c_format_of, with_codec
from fxprec.numerics.formats import Format, parse
from fxprec.numerics.memory import empty_like
from fxprec.numerics.rows import INFINITY, row_of
from fxprec.numerics.stats import WIDTH
from fxprec.runtime.cpu.measure import wanted_moments, with_moments


class Params(ctypes.Structure):
    """The parameters of one cast; mirrors ``struct Params`` of kernels.cpp."""

    _fields_ = (
        ("format", CFormat),
        ("infinity", ctypes.c_int32),
        ("carried", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("unscale", ctypes.c_float),
    )


@lru_cache(maxsize=4096)
def params_of_row(entries: tuple[int, ...], *, carried: int = 0, keep: bool = False) -> Params:
    """Return the parameters of ``fxprec_round`` from the first columns of a row of the scale table (`FormatRow`).

    ``carried`` is the scale exponent of the incoming tensor. ``keep`` keeps infinities among the values, whatever the
    format makes of them.
    """
    row = row_of(entries)
    return _params(c_format_of(row), row.scale_exponent, 0, carried, keep)


@lru_cache(maxsize=4096)
def params_of(fmt: Format, scale_exp: int = 0, unscale_exp: int = 0, *, carried: int = 0, keep: bool = False) -> Params:
    """Return the packing kernels' parameters for ``fmt``; see `params_of_row`. Loads take ``unscale_exp`` off."""
    return _params(c_format(fmt), scale_exp, unscale_exp, carried, keep)


def _params(fmt: CFormat, scale_exp: int, unscale_exp: int, carried: int, keep: bool) -> Params:
    infinity = INFINITY if keep else fmt.overflow
    scales = {"scale": 2.0**scale_exp, "unscale": 2.0**-unscale_exp}
    return Params(format=fmt, infinity=infinity, carried=carried, **scales)


@cache
def _library() -> ctypes.CDLL:
    memory, end = ctypes.c_void_p, (ctypes.c_int64, ctypes.POINTER(Params))
    signatures: dict[str, tuple[type | None, ...]] = {"fxprec_round": (None, memory, memory, memory, *end)}
    for bits in (8, 16, 32):  # of a code
        signatures[f"fxprec_store{bits}"] = (None, memory, memory, memory, memory, *end)
        signatures[f"fxprec_load{bits}"] = (None, memory, memory, *end)
    return native.load(with_codec(native.text_beside(__file__, "kernels.cpp")), signatures)


def _kernel(name: str, fmt: Format) -> Any:
    """Return the kernel for codes of the format's width."""
    return getattr(_library(), f"fxprec_{name}{8 * fmt.code_dtype.itemsize}")


def _dense(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` in dense memory and in ``dtype``, with the strides that its fake result promises."""
    native.check_readable("x", x)
    if torch.ops.aten.is_non_overlapping_and_dense(x):
        return x.to(dtype).resolve_neg()
    return torch.empty_like(x, dtype=dtype).copy_(x)


def _entries(table: torch.Tensor, row: int) -> list[int]:
    """Return a row of the table of scales and formats."""
    native.check_table(table, row, TABLE_COLUMNS)
    return table[row].tolist()


def _new_counts() -> torch.Tensor:
    return torch.empty(WIDTH, dtype=torch.float64, device="cpu")


def store(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, value: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes, rounded float32 values or an empty tensor, counts (10,) float64).

    The values keep the scale with which they are stored; ``keep`` keeps infinities among the values.
    """
    x = _dense(x, torch.float32)
    values = empty_like(x, x.dtype) if value else None
    codes, counts = _store(x, values, table, row, parse(format), storage, keep)
    return codes, x.new_empty(0) if values is None else values, counts


def store_(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `store` and write the rounded values over dense float32 ``x``; return the codes and the counts."""
    return _store(x, x, table, row, parse(format), storage, keep)


def _store(
    x: torch.Tensor, values: torch.Tensor | None, table: torch.Tensor, row: int, fmt: Format, storage: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    entries, count = _entries(table, row), x.numel()
    x_at = native.address("x", x, torch.float32, count)
    moments = wanted_moments(x, entries)  # first: x may be overwritten
    codes, counts = empty_like(x, stored_dtype(fmt, storage)), _new_counts()
    codes_at = native.address("codes", codes, _code_dtype(codes, fmt), count, like=x)
    values_at = 0 if values is None else native.address("values", values, torch.float32, count, like=x)
    counts_at = native.address("counts", counts, torch.float64, WIDTH)
    params = params_of(fmt, entries[0], carried=entries[CARRIED], keep=keep)
    _kernel("store", fmt)(x_at, codes_at, values_at, counts_at, count, ctypes.byref(params))
    return codes, with_moments(counts, moments)


def _code_dtype(codes: torch.Tensor, fmt: Format) -> torch.dtype:
    """Return the dtype of codes of ``fmt``: the hardware's own if ``codes`` has that dtype, else an integer."""
    return codes.dtype if codes.dtype == fmt.torch_dtype else fmt.code_dtype


def round_values(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rounded float32 values, counts); in ``simulate`` the table's row defines the format."""
    x = _dense(x, torch.float32)
    values = empty_like(x, x.dtype)
    return values, _round(x, values, table, row, parse(format), storage, keep)


def round_(x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool) -> torch.Tensor:
    """Run `round_values` over dense float32 ``x``; return the counts."""
    return _round(x, x, table, row, parse(format), storage, keep)


def _round(
    x: torch.Tensor, values: torch.Tensor, table: torch.Tensor, row: int, fmt: Format, storage: str, keep: bool
) -> torch.Tensor:
    entries, count = _entries(table, row), x.numel()
    x_at = native.address("x", x, torch.float32, count)
    moments = wanted_moments(x, entries)
    counts = _new_counts()
    values_at = native.address("values", values, torch.float32, count, like=x)
    counts_at = native.address("counts", counts, torch.float64, WIDTH)
    if storage == "simulate":
        params = params_of_row(tuple(entries[:CARRIED]), carried=entries[CARRIED], keep=keep)
    else:
        params = params_of(fmt, entries[0], carried=entries[CARRIED], keep=keep)
    _library().fxprec_round(x_at, values_at, counts_at, count, ctypes.byref(params))
    return with_moments(counts, moments)


def load(q: torch.Tensor, table: torch.Tensor, row: int, format: str) -> torch.Tensor:
    """Return the float32 values of stored codes, with the row's scale taken off."""
    fmt = parse(format)
    q = _dense(q, q.dtype)
    count = q.numel()
    codes_at = native.address("codes", q, _code_dtype(q, fmt), count)
    values = empty_like(q, torch.float32)
    values_at = native.address("values", values, torch.float32, count, like=q)
    scale_exp = 0 if row == AS_STORED else _entries(table, row)[0]
    _kernel("load", fmt)(codes_at, values_at, count, ctypes.byref(params_of(fmt, unscale_exp=scale_exp)))
    return values


Store.implement(store, "CPU")
Round.implement(round_values, "CPU")
StoreOver.implement(store_, "CPU")
RoundOver.implement(round_, "CPU")
Load.implement(load, "CPU")
