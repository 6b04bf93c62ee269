"""Symbolic ops of GEMMs whose operands stay in codes, and the kernels that lowering turns them into.

``gemm(a, b, bias, table, row_a, row_b, format_a, format_b, dtype, kernel, fast) -> y``
    The product of what codes ``a`` (M, K) and ``b`` (K, N) stand for, each divided by ``2**table[row, 0]`` (row
    ``AS_STORED``: as it is), plus ``bias``, summed in float32 and rounded to ``dtype``. ``kernel`` is ``native``
    (``torch._scaled_mm``: ``a`` row-major, ``b`` column-major; ``fast``: adds up in fewer bits) or ``generated`` (any
    layout).
``transposed(q) -> t``
    Codes (..., N) as a contiguous matrix (N, rest): the second copy that a native GEMM over the rows reads.
``gathered(counters) -> (10 * sites,) float64``
    Rows of counts from the striped counters of kernels (`fxprec.numerics.stats`).

Kernels: ``quantize_transpose`` (codes, transposed codes, counters), ``transpose_codes``, ``matmul_codes`` and
``matmul_to_codes`` (codes, counters; its product is rounded to ``dtype`` before it is encoded).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node

from fxprec.ir.calls import Call
from fxprec.ir.symbolic import stored_dtype
from fxprec.ir.symbolic_stats import Totals
from fxprec.numerics.formats import parse
from fxprec.numerics.stats import SITE_COUNTERS, WIDTH


@dataclass(frozen=True)
class _Product(Call):
    a: Node
    b: Node
    bias: Node | None
    table: Node
    row_a: int
    row_b: int
    format_a: str
    format_b: str
    dtype: torch.dtype

    @property
    def formats(self) -> tuple[str, str]:
        return self.format_a, self.format_b


@dataclass(frozen=True)
class CodedGemm(_Product, op="gemm"):
    kernel: str
    fast: bool
    """Whether tensor cores may add up in fewer bits than float32 (``use_fast_accum`` of `torch._scaled_mm`)."""


@dataclass(frozen=True)
class Transposed(Call, op="transposed"):
    q: Node


@dataclass(frozen=True)
class Gathered(Call, op="gathered"):
    counters: Node


@dataclass(frozen=True)
class QuantizeTranspose(Call, op="quantize_transpose", returns="(Tensor, Tensor, Tensor)"):
    x: Node
    table: Node
    row: int
    format: str
    storage: str
    keep: bool
    row_major: bool
    """Whether the codes themselves are wanted too."""
    stats: bool


@dataclass(frozen=True)
class TransposeCodes(Call, op="transpose_codes"):
    q: Node


@dataclass(frozen=True)
class MatmulCodes(_Product, op="matmul_codes"):
    pass


@dataclass(frozen=True)
class MatmulToCodes(_Product, op="matmul_to_codes", returns="(Tensor, Tensor)"):
    row: int
    format: str
    storage: str
    keep: bool
    stats: bool


GEMM = CodedGemm.target
TRANSPOSED = Transposed.target
GATHERED = Gathered.target
TRANSPOSE_CODES = TransposeCodes.target
MATMUL_CODES = MatmulCodes.target


@dataclass(frozen=True)
class GemmKernel:
    """A kernel of `fxprec.runtime.gemm`, by what its machine code depends on."""

    kind: Literal["gemm", "quantize+transpose", "transpose", "totals"]
    formats: tuple[str, ...] = ()
    """Of a GEMM: of its operands, then of the codes it stores, if any."""

    @property
    def name(self) -> str:
        operands = " x ".join(self.formats[:2])
        out = f" to {self.formats[2]}" if len(self.formats) > 2 else ""
        return f"{self.kind} {operands}{out}".rstrip()


def kernel_called(node: Node) -> GemmKernel | None:
    """Return the kernel a node calls, if it calls one of these."""
    if node.target is TRANSPOSE_CODES:
        return GemmKernel("transpose")
    if node.target is Totals.target or node.target is GATHERED:
        return GemmKernel("totals")
    if (both := QuantizeTranspose.match(node)) is not None:
        return GemmKernel("quantize+transpose", (both.format,))
    if (product := MatmulCodes.match(node)) is not None:
        return GemmKernel("gemm", product.formats)
    if (stored := MatmulToCodes.match(node)) is not None:
        return GemmKernel("gemm", (*stored.formats, stored.format))
    return None


def native_name(a: torch.Tensor, b: torch.Tensor) -> str:
    """Return what messages, and `lower`, call torch's GEMM of 8-bit floats."""
    names = (str(x.dtype).removeprefix("torch.") for x in (a, b))
    return f"torch._scaled_mm {' x '.join(names)}"


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    row_a: int,
    row_b: int,
    format_a: str,
    format_b: str,
    dtype: torch.dtype,
    *rest: object,
) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


CodedGemm.fake(_product)
MatmulCodes.fake(_product)


def _transposed(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[-1], q.numel() // q.shape[-1])


Transposed.fake(_transposed)
TransposeCodes.fake(_transposed)


@Gathered.fake
def _(counters: torch.Tensor) -> torch.Tensor:
    return counters.new_empty(counters.shape[0] // SITE_COUNTERS * WIDTH, dtype=torch.float64)


@QuantizeTranspose.fake
def _(
    x: torch.Tensor,
    table: torch.Tensor,
    row: int,
    format: str,
    storage: str,
    keep: bool,
    row_major: bool,
    stats: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = x.new_empty(x.shape, dtype=stored_dtype(parse(format), storage))
    counters = x.new_empty(SITE_COUNTERS if stats else 0, dtype=torch.int32)
    return codes if row_major else codes.new_empty(0), _transposed(codes), counters


@MatmulToCodes.fake
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    row_a: int,
    row_b: int,
    format_a: str,
    format_b: str,
    dtype: torch.dtype,
    row: int,
    format: str,
    storage: str,
    keep: bool,
    stats: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = a.new_empty(a.shape[0], b.shape[1], dtype=stored_dtype(parse(format), storage))
    return codes, a.new_empty(SITE_COUNTERS, dtype=torch.int32)
