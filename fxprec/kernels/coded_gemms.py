"""Kernels of GEMMs over codes and of the casts beside them, to which lowering converts ``gemm`` and ``transposed``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, FakeCall
from fxprec.ir.symbolic import Product, Stored, product_like, stored_dtype, transposed_like
from fxprec.kernels.counts import GATHERED, Totals
from fxprec.numerics.formats import parse
from fxprec.numerics.stats import SITE_COUNTERS


def _quantize_transpose(call: FakeCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = call.x.new_empty(call.x.shape, dtype=stored_dtype(parse(call.format), call.storage))
    counters = call.x.new_empty(SITE_COUNTERS if call.stats else 0, dtype=torch.int32)
    return codes if call.row_major else codes.new_empty(0), transposed_like(codes), counters


class QuantizeTranspose(Stored, op="quantize_transpose", fake=_quantize_transpose, returns="(Tensor, Tensor, Tensor)"):
    """Return codes (empty without ``row_major``), transposed codes and counters."""

    keep: bool
    row_major: bool
    """Whether the untransposed codes are returned too."""
    stats: bool


class TransposeCodes(Call, op="transpose_codes", fake=lambda call: transposed_like(call.q)):
    """Transpose codes as a contiguous matrix."""

    q: Node


class MatmulCodes(Product, op="matmul_codes", fake=product_like):
    """Decode two operands and multiply them, in one kernel."""


def _matmul_to_codes(call: FakeCall) -> tuple[object, object]:
    codes = product_like(call, stored_dtype(parse(call.format), call.storage))
    return codes, call.a.new_empty(SITE_COUNTERS, dtype=torch.int32)


class MatmulToCodes(Product, op="matmul_to_codes", fake=_matmul_to_codes, returns="(Tensor, Tensor)"):
    """Multiply as `MatmulCodes`; return the codes of the product, first rounded to ``dtype``, and counters."""

    row: int
    format: str
    storage: str
    keep: bool
    stats: bool


TRANSPOSE_CODES = TransposeCodes.target
MATMUL_CODES = MatmulCodes.target


@dataclass(frozen=True)
class GemmKernel:
    """A kernel of `fxprec.runtime.gemm`, identified by what its machine code depends on."""

    kind: Literal["gemm", "quantize+transpose", "transpose", "totals"]
    formats: tuple[str, ...] = ()
    """For a GEMM, the formats of its operands, then of the codes that it stores, if any; for a cast, its format."""

    @property
    def name(self) -> str:
        """Return the kernel's name in messages and in ``Lowering.without``."""
        operands = " x ".join(self.formats[:2])
        out = f" to {self.formats[2]}" if len(self.formats) > 2 else ""
        return f"{self.kind} {operands}{out}".rstrip()


def kernel_called(node: Node) -> GemmKernel | None:
    """Return the kernel that a node calls, if it is one of this module's."""
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
    """Return the name of torch's GEMM of 8-bit floats in messages and in `lower`."""
    names = (str(x.dtype).removeprefix("torch.") for x in (a, b))
    return f"torch._scaled_mm {' x '.join(names)}"
