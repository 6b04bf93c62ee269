"""Make two low copies of a matrix in one read, row-major and transposed codes, and count what rounding loses.

On Hopper the three GEMMs of a linear layer need both copies, because fp8 tensor cores read operands along the summed
dimension only (docs/gemm.md has the table).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.numerics.formats import Format
from fxprec.numerics.stats import SITE_COUNTERS
from fxprec.runtime.gemm.hardware_casts import casts_in_hardware
from fxprec.runtime.gemm.launch import enqueue
from fxprec.runtime.gemm.transpose_kernels import COLUMNS, ROWS, WARPS, flags, grid, launch, transpose_kernel


def quantize_transpose(
    x: Tensor, row: Tensor, fmt: Format, *, keep: bool = False, row_major: bool = True, stats: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes (M, N) of ``x``, their transpose (N, M), both contiguous, and the striped counters.

    ``x`` (M, N) is float32, bfloat16 or float16 in any layout; ``row`` is its row of the scale table. The codes are
    those of ``encode(x * 2**row[0])``. Without ``row_major`` the first result is empty, without ``stats`` the last.
    """
    m, n = x.shape
    q = torch.empty((m, n) if row_major else 0, dtype=fmt.code_dtype, device=x.device)
    t = torch.empty(n, m, dtype=fmt.code_dtype, device=x.device)
    counts = torch.zeros(SITE_COUNTERS if stats else 0, dtype=torch.int32, device=x.device)
    if x.numel():
        hardware = casts_in_hardware(fmt, x.device, keep=keep)
        wanted = flags(fmt, keep=keep, row_major=row_major, stats=stats, hardware=hardware)
        launch(x, row, q, t, counts, wanted)
    return q, t, counts


def transpose(q: Tensor) -> Tensor:
    """Return the contiguous transpose (N, M) of codes (M, N) in any layout."""
    m, n = q.shape
    codes = q.view(torch.uint8) if q.itemsize == 1 else q.view(torch.uint16)
    t = torch.empty(n, m, dtype=codes.dtype, device=q.device)
    if q.numel():
        tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
        enqueue(transpose_kernel, grid(m, n), codes, t, m, n, *q.stride(), **tile)
    return t.view(q.dtype)
