"""Symbolic ops of GEMMs whose operands stay in codes, and the kernels that lowering turns them into.

``gemm(a, b, bias, table, row_a, row_b, format_a, format_b, dtype, kernel) -> y``
    The product of what codes ``a`` (M, K) and ``b`` (K, N) stand for, each divided by ``2**table[row, 0]`` (row
    ``AS_STORED``: as it is), plus ``bias``, summed in float32 and rounded to ``dtype``. ``kernel`` is ``native``
    (``torch._scaled_mm``: ``a`` row-major, ``b`` column-major) or ``generated`` (any layout).
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

from fxprec.ir.symbolic import stored_dtype
from fxprec.numerics.formats import parse
from fxprec.numerics.stats import SITE_COUNTERS, WIDTH

Kernel = Literal["native", "generated"]

_library = torch.library.Library("fxprec", "FRAGMENT")
_OPERANDS = (
    "Tensor a, Tensor b, Tensor? bias, Tensor table, int row_a, int row_b, str format_a, str format_b, ScalarType dtype"
)
_library.define(f"gemm({_OPERANDS}, str kernel) -> Tensor")
_library.define("transposed(Tensor q) -> Tensor")
_library.define("gathered(Tensor counters) -> Tensor")
_library.define(
    "quantize_transpose(Tensor x, Tensor table, int row, str format, str storage, bool keep)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define("transpose_codes(Tensor q) -> Tensor")
_library.define(f"matmul_codes({_OPERANDS}) -> Tensor")
_library.define(
    f"matmul_to_codes({_OPERANDS}, int row, str format, str storage, bool keep, bool stats) -> (Tensor, Tensor)"
)

GEMM = torch.ops.fxprec.gemm.default
TRANSPOSED = torch.ops.fxprec.transposed.default
GATHERED = torch.ops.fxprec.gathered.default
QUANTIZE_TRANSPOSE = torch.ops.fxprec.quantize_transpose.default
TRANSPOSE_CODES = torch.ops.fxprec.transpose_codes.default
MATMUL_CODES = torch.ops.fxprec.matmul_codes.default
MATMUL_TO_CODES = torch.ops.fxprec.matmul_to_codes.default


@dataclass(frozen=True)
class GemmKernel:
    """A kernel of `fxprec.runtime.gemm`, by what its machine code depends on."""

    kind: Literal["gemm", "quantize+transpose", "transpose"]
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
    if node.target is QUANTIZE_TRANSPOSE:
        return GemmKernel("quantize+transpose", (str(node.args[3]),))
    if node.target is MATMUL_CODES:
        return GemmKernel("gemm", (str(node.args[6]), str(node.args[7])))
    if node.target is MATMUL_TO_CODES:
        return GemmKernel("gemm", (str(node.args[6]), str(node.args[7]), str(node.args[10])))
    return None


@torch.library.register_fake("fxprec::gemm")
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
    kernel: str,
) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


def _transposed(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[-1], q.numel() // q.shape[-1])


torch.library.register_fake("fxprec::transposed", _transposed)
torch.library.register_fake("fxprec::transpose_codes", _transposed)


@torch.library.register_fake("fxprec::gathered")
def _(counters: torch.Tensor) -> torch.Tensor:
    return counters.new_empty(counters.shape[0] // SITE_COUNTERS * WIDTH, dtype=torch.float64)


@torch.library.register_fake("fxprec::quantize_transpose")
def _(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = x.new_empty(x.shape, dtype=stored_dtype(parse(format), storage))
    return codes, _transposed(codes), x.new_empty(SITE_COUNTERS, dtype=torch.int32)


@torch.library.register_fake("fxprec::matmul_codes")
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
) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


@torch.library.register_fake("fxprec::matmul_to_codes")
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
