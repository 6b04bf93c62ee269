"""Run the CPU kernel, which Inductor's own C++ builder compiles once and keeps in its disk cache."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from fxprec.numerics import native
from fxprec.numerics.cpp import CFormat, c_format, with_codec
from fxprec.numerics.formats import FP32, Format
from fxprec.runtime.arith.spec import Spec


class Rounding(ctypes.Structure):
    """The format of one rounding; mirrors ``struct Rounding`` of kernel.cpp."""

    _fields_ = (("format", CFormat), ("exact", ctypes.c_int32))


class Task(ctypes.Structure):
    """One product to compute; mirrors ``struct Task`` of kernel.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "out")),
        *((name, ctypes.c_int64) for name in ("m", "k", "n", "chunk")),
        ("product", Rounding),
        ("sum", Rounding),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernel; without a compiler, warn and return None."""
    source = with_codec(native.text_beside(__file__, "kernel.cpp"))
    signature = (None, ctypes.POINTER(Task), *[ctypes.c_int32] * 4)
    slower = "fxprec.arith runs as a plain loop, many times slower"
    return native.load_or_warn(source, {"fxprec_arith_matmul": signature}, slower)


def matmul(a: Tensor, b: Tensor, spec: Spec) -> Tensor | None:
    """Return the product with the bits of `reference.matmul`, or None if no kernel compiles."""
    loaded = library()
    if loaded is None:
        return None
    for name, t in (("a", a), ("b", b)):
        native.check_readable(name, t, dim=2)
    a, b = (t.contiguous().resolve_neg() for t in (a, b))
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=torch.float32, device="cpu")
    addresses = {
        "a": native.address("a", a, torch.float32, m * k),
        "b": native.address("b", b, torch.float32, k * n),
        "out": native.address("out", out, torch.float32, m * n),
    }
    formats = {"product": _rounding(spec.fmt), "sum": _rounding(spec.accumulate)}
    task = Task(m=m, k=k, n=n, chunk=spec.chunk, **addresses, **formats)
    flags = (_is_plain(a, b, spec), spec.odd_product, spec.odd_sum, spec.kahan)
    loaded.fxprec_arith_matmul(ctypes.byref(task), *flags)
    return out


def _is_plain(a: Tensor, b: Tensor, spec: Spec) -> bool:
    """Return whether inf and NaN cannot occur, which saves the kernel a third of its work."""
    formats = (spec.fmt, spec.accumulate)
    if any(f.overflow != "saturate" or f.mantissa_bits == 0 for f in formats):
        return False
    finite = all(t.numel() == 0 or bool(torch.isfinite(t.abs().max())) for t in (a, b))
    # Sums of two saturated numbers must not reach float32's inf.
    return finite and all(f.largest < 2.0**126 for f in formats) and spec.fmt.largest**2 < 2.0**127


@cache
def _rounding(fmt: Format) -> Rounding:
    return Rounding(c_format(fmt), fmt == FP32)
