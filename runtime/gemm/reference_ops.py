"""Reference implementations of the symbolic GEMM ops: plain float32, on any device. The eager lowering runs them."""

from __future__ import annotations

import torch

from fxprec.ir.symbolic import AS_STORED, CodedGemm, Transposed
from fxprec.kernels.counts import Gathered
from fxprec.numerics import stats
from fxprec.numerics.formats import parse
from fxprec.numerics.reference import reference_decode


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    row_a: int,
    row_b: int,
    format_a: str,
    format_b: str,
    dtype: torch.dtype,
    kernel: str,
    fast: bool,
) -> torch.Tensor:
    """Multiply codes ``a`` (m, k) and ``b`` (k, n) in float32, add ``bias`` (n,), and return (m, n) numbers."""
    product = numbers(a, table, row_a, format_a) @ numbers(b, table, row_b, format_b)
    return (product if bias is None else product + bias.to(torch.float32)).to(dtype)


def transposed(q: torch.Tensor) -> torch.Tensor:
    """Return (..., columns) as (columns, rows), contiguous."""
    return q.reshape(-1, q.shape[-1]).t().contiguous()


def gathered(counters: torch.Tensor) -> torch.Tensor:
    """Add up the counters of all blocks; return rows of counts as a flat tensor."""
    return stats.gathered(counters).flatten()


def numbers(codes: torch.Tensor, table: torch.Tensor, row: int, format: str) -> torch.Tensor:
    """Decode codes and take off the scale in a row of the table."""
    fmt = parse(format)
    exponent = 0 if row == AS_STORED else int(table[row, 0])
    return reference_decode(codes.view(fmt.code_dtype), fmt) * 2.0**-exponent


CodedGemm.implement(gemm)
Transposed.implement(transposed)
Gathered.implement(gathered)
