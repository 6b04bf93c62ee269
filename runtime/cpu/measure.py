"""Compute the moments of a dense float32 tensor on a CPU, in steps that measure; other steps pay nothing."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import torch

from fxprec.ir.symbolic import MEASURE
from fxprec.numerics import cpp, native
from fxprec.numerics.stats import Counts


@cache
def _library() -> ctypes.CDLL:
    pointer = ctypes.c_void_p
    signature = (None, pointer, pointer, ctypes.c_int64, ctypes.c_float, ctypes.c_float)
    source = native.text_beside(__file__, "measure.cpp").replace("/*PRELUDE*/", cpp.PRELUDE)
    return native.load(source, {"fxprec_moments": signature})


Moments: TypeAlias = tuple[float, float, float, float]


def wanted_moments(x: torch.Tensor, entries: Sequence[int]) -> Moments | None:
    """Return the moments of dense float32 ``x``, or None if row ``entries`` of the table does not ask for them."""
    if not entries[MEASURE]:
        return None
    return moments_of(x, float(x.detach().abs().max()) if x.numel() else 0.0)


def with_moments(counts: torch.Tensor, moments: Moments | None) -> torch.Tensor:
    """Fill in the moments that a storing kernel leaves out; ``counts`` is a row of `Counts`."""
    if moments is not None:
        counts[_NONZERO : _NONZERO + len(moments)] = torch.tensor(moments, dtype=torch.float64, device="cpu")
    return counts


def moments_of(x: torch.Tensor, amax: float) -> Moments:
    """Return the moments of `reference_ops.measured_moments`, within float32's accuracy."""
    if not 0.0 < amax < math.inf or not x.numel():
        return (0.0, 0.0, 0.0, 0.0)
    # Squares are relative to the largest magnitude, logs to 2^-20 of it, so that neither underflows nor cancels.
    _, exponent = math.frexp(amax)
    unit, shift = max(-126, min(127, -exponent)), exponent - 20
    out = (ctypes.c_double * 4)()
    count = x.numel()
    _library().fxprec_moments(native.address("x", x, torch.float32, count), out, count, 2.0**unit, shift)
    squares, nonzero, logs, log_squares = out
    squared = log_squares + 2 * shift * logs + nonzero * shift**2
    return nonzero, math.ldexp(squares, -2 * unit), (logs + nonzero * shift) * math.log(2), squared * math.log(2) ** 2


_NONZERO = Counts._fields.index("nonzero")
