"""Run the Triton kernel: a tile of sums in registers, with products and partial sums rounded in integer arithmetic."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxprec.numerics import ahead, device
from fxprec.numerics.formats import FP32, Format
from fxprec.runtime import on_device
from fxprec.runtime.arith.spec import Spec

_ROWS, _COLUMNS = 32, 32


@triton.jit
def _to_odd(near: tl.tensor, error: tl.tensor) -> tl.tensor:
    bits = near.to(tl.int32, bitcast=True)
    zero = (bits & 0x7FFFFFFF) == 0
    base = tl.where(zero, tl.where(error > 0, 0, -0x80000000), bits)
    step = tl.where(zero | ((error > 0) == (bits >= 0)), 1, -1)
    inexact = ((error > 0) | (error < 0)) & ((bits & 0x7FFFFFFF) < 0x7F800000) & ((base & 1) == 0)
    return tl.where(inexact, base + step, bits).to(tl.float32, bitcast=True)


@triton.jit
def _product(a: tl.tensor, b: tl.tensor, ROUND: tl.constexpr, ODD: tl.constexpr) -> tl.tensor:
    near = a * b
    if ODD:
        exact = a.to(tl.float64) * b.to(tl.float64)
        near = exact.to(tl.float32)
        near = _to_odd(near, exact - near.to(tl.float64))
    return near if ROUND is None else ROUND(near)


@triton.jit
def _plus(a: tl.tensor, b: tl.tensor, ROUND: tl.constexpr, ODD: tl.constexpr) -> tl.tensor:
    total = a + b
    if ODD:
        other = total - a
        total = _to_odd(total, (a - (total - other)) + (b - other))
    return total if ROUND is None else ROUND(total)


@triton.jit
def _accumulate(
    s: tl.tensor, c: tl.tensor, p: tl.tensor, ROUND: tl.constexpr, ODD: tl.constexpr, KAHAN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    if KAHAN:
        y = _plus(p, -c, ROUND, ODD)
        t = _plus(s, y, ROUND, ODD)
        c = _plus(_plus(t, -s, ROUND, ODD), -y, ROUND, ODD)
        s = t
    else:
        s = _plus(s, p, ROUND, ODD)
    return s, c


@triton.jit
def _matmul_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    m: tl.tensor,
    depth: tl.tensor,
    n: tl.tensor,
    chunk: tl.tensor,
    PRODUCT: tl.constexpr,
    SUM: tl.constexpr,
    ODD_PRODUCT: tl.constexpr,
    ODD_SUM: tl.constexpr,
    KAHAN: tl.constexpr,
    CHUNKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    tiles = tl.cdiv(n, COLUMNS)  # one dimension of programs, because the second is limited to 65,535
    i = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    j = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    s = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    c = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    total_c = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    a_at = a_ptr + i.to(tl.int64) * depth
    b_at = b_ptr + j
    for k in range(0, depth):
        a = tl.load(a_at, mask=i < m, other=0.0)
        b = tl.load(b_at, mask=j < n, other=0.0)
        a_at += 1
        b_at += n
        p = _product(a[:, None], b[None, :], PRODUCT, ODD_PRODUCT)
        s, c = _accumulate(s, c, p, SUM, ODD_SUM, KAHAN)
        if CHUNKED:  # noqa: SIM102  # known when compiling, the other is not
            if ((k + 1) % chunk == 0) | (k + 1 == depth):
                total, total_c = _accumulate(total, total_c, s, SUM, ODD_SUM, KAHAN)
                s = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
                c = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    if CHUNKED:
        s = total
    at = i[:, None].to(tl.int64) * n + j[None, :]
    tl.store(out_ptr + at, s, mask=(i[:, None] < m) & (j[None, :] < n))


def _rounder(fmt: Format) -> Any:
    return None if fmt == FP32 else device.rounder(fmt)


def _flags(spec: Spec) -> dict[str, object]:
    return {
        "PRODUCT": _rounder(spec.fmt),
        "SUM": _rounder(spec.accumulate),
        "ODD_PRODUCT": spec.odd_product,
        "ODD_SUM": spec.odd_sum,
        "KAHAN": spec.kahan,
        "CHUNKED": spec.chunk > 0,
        "ROWS": _ROWS,
        "COLUMNS": _COLUMNS,
    }


def matmul(a: Tensor, b: Tensor, spec: Spec) -> Tensor:
    """Return the product with the bits of `reference.matmul`."""
    a, b = a.contiguous(), b.contiguous()
    (m, depth), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=torch.float32, device=a.device)
    if out.numel():
        grid = (triton.cdiv(m, _ROWS) * triton.cdiv(n, _COLUMNS),)
        with on_device.current(a.device):
            _matmul_kernel[grid](a, b, out, m, depth, n, max(1, spec.chunk), **_flags(spec), enable_fp_fusion=False)
    return out


def compile_to_ptx(spec: Spec, arch: int) -> str:
    """Return PTX of the kernel for an NVIDIA architecture (80, 89, 90, 100), without a GPU."""
    kinds = {"a_ptr": "*fp32", "b_ptr": "*fp32", "out_ptr": "*fp32"}
    kinds |= dict.fromkeys(("m", "depth", "n", "chunk"), "i32")
    return str(ahead.compile_for(_matmul_kernel, kinds, _flags(spec), arch).asm["ptx"])
