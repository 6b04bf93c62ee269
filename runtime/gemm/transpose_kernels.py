"""Triton kernels that make two low copies of a matrix in one read, row-major and transposed, and count what is lost.

On Hopper the three GEMMs of a linear layer need both copies, because fp8 tensor cores read operands along the summed
dimension only (docs/gemm.md has the table).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from fxprec.ir import symbolic
from fxprec.numerics import device
from fxprec.numerics.formats import Format
from fxprec.numerics.rows import format_row, thresholds
from fxprec.numerics.stats import device_function
from fxprec.runtime.gemm.launch import enqueue

# 94 to 99 registers and no spill on sm_80 to sm_100 (4 warps: 180, and 500 spilled bytes for strided input).
ROWS, COLUMNS, WARPS = 64, 128, 8
PART = 16
power = device.power()
largest_bits, count_lost = device_function("largest_bits"), device_function("count_lost")
count_moments, note_facts = device_function("count_moments"), device_function("note_facts")


@triton.jit(do_not_specialize_on_alignment=["row_ptr"])
def quantize_transpose_kernel(
    x_ptr: tl.tensor,
    row_ptr: tl.tensor,
    q_ptr: tl.tensor,
    t_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    stride_m: tl.tensor,
    stride_n: tl.tensor,
    ENCODE: tl.constexpr,
    LIMITS: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    STATS: tl.constexpr,
    CARRIED: tl.constexpr,
    MEASURE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Round one tile, store its codes and their transpose, and count; see `quantize_transpose`."""
    tiles = tl.cdiv(n, COLUMNS)
    program = tl.program_id(0)
    i = (program // tiles) * ROWS + tl.arange(0, ROWS)
    j = (program % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i[:, None] < m) & (j[None, :] < n)
    at = i[:, None].to(tl.int64) * stride_m + j[None, :].to(tl.int64) * stride_n
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if STATS:
        largest = largest_bits(x, None)  # zeros are loaded outside; first, so that ``x`` leaves its registers
    factor = power(tl.load(row_ptr))
    stored = x * factor
    code = ENCODE(stored).to(q_ptr.dtype.element_ty)
    if ROW_MAJOR:
        tl.store(q_ptr + i[:, None].to(tl.int64) * n + j[None, :], code, mask=inside)
    tl.store(t_ptr + j[:, None].to(tl.int64) * m + i[None, :], tl.trans(code), mask=tl.trans(inside))
    if STATS:
        measure = tl.load(row_ptr + MEASURE)
        if program == 0:
            note_facts(counts_ptr, tl.cast(m, tl.int64) * n, tl.load(row_ptr + CARRIED), tl.load(row_ptr), measure)
        count_lost(largest, stored, None, factor, counts_ptr, LIMITS[0], LIMITS[1])
        if measure != 0:  # few steps measure: read parts again, because a whole tile would cost every step registers
            for part in range(ROWS // PART):
                k = (program // tiles) * ROWS + part * PART + tl.arange(0, PART)
                here = (k[:, None] < m) & (j[None, :] < n)
                there = k[:, None].to(tl.int64) * stride_m + j[None, :].to(tl.int64) * stride_n
                again = tl.load(x_ptr + there, mask=here, other=0.0).to(tl.float32)
                count_moments(again * factor, here, counts_ptr)


@triton.jit
def transpose_kernel(
    q_ptr: tl.tensor,
    t_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    stride_m: tl.tensor,
    stride_n: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Store the transpose of one tile of codes."""
    tiles = tl.cdiv(n, COLUMNS)
    i = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    j = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i[:, None] < m) & (j[None, :] < n)
    code = tl.load(q_ptr + i[:, None].to(tl.int64) * stride_m + j[None, :].to(tl.int64) * stride_n, mask=inside)
    tl.store(t_ptr + j[:, None].to(tl.int64) * m + i[None, :], tl.trans(code), mask=tl.trans(inside))


def grid(m: int, n: int) -> tuple[int]:
    """Return the number of tiles, each a program, of a matrix (M, N)."""
    return (-(-m // ROWS) * -(-n // COLUMNS),)


@cache
def flags(
    fmt: Format, *, keep: bool = False, row_major: bool = True, stats: bool = True, hardware: bool = False
) -> Mapping[str, object]:
    """Return the compile-time arguments of the kernel for a format; ``hardware``: round by the cast instruction."""
    return {
        "ENCODE": (device.caster if hardware else device.encoder)(fmt, keep=keep),
        "LIMITS": thresholds(format_row(fmt)),
        "ROW_MAJOR": row_major,
        "STATS": stats,
        "CARRIED": symbolic.CARRIED,
        "MEASURE": symbolic.MEASURE,
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "PART": PART,
    }


def launch(x: Tensor, row: Tensor, q: Tensor, t: Tensor, counts: Tensor, wanted: Mapping[str, object]) -> None:
    """Run the kernel with the compile-time arguments of `flags`."""
    m, n = x.shape
    sizes, options = (m, n, *x.stride()), {**wanted, "num_warps": WARPS, "enable_fp_fusion": False}
    enqueue(quantize_transpose_kernel, grid(m, n), x, row, q, t, counts, *sizes, **options)
