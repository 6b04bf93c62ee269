"""Make the parameters of a cast for the CPU kernels: the C struct of ``kernels.cpp``."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from fxprec.numerics.cpp import CFormat, c_format, c_format_of
from fxprec.numerics.formats import Format
from fxprec.numerics.rows import INFINITY, row_of


class Params(ctypes.Structure):
    """The parameters of one cast; mirrors ``struct Params``."""

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
