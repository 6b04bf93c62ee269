"""Define the fused multiply-add of the generated Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from fxprec import compat


@triton.jit
def _emulated(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """Return a * b + c as `fma._emulated` does, because the interpreter's own ``tl.fma`` rounds twice."""
    product = a.to(tl.float64) * b.to(tl.float64)
    addend = c.to(tl.float64)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.to(tl.int64, bitcast=True)
    step = tl.where((error > 0) == (total > 0), 1, -1).to(tl.int64)
    inexact = (error != 0) & ((bits & 1) == 0) & (tl.abs(total) < float("inf"))
    return tl.where(inexact, bits + step, bits).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _fused(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    return tl.fma(a, b, c)


fma = _emulated if compat.runs_in_interpreter(_emulated) else _fused
