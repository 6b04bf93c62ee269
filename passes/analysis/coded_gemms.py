"""Find GEMMs whose operands are stored in codes, and the kernel that can multiply the codes themselves.

A native fp8 GEMM (cuBLASLt; sm_89 and later) reads both operands along the summed dimension: ``a`` row-major, ``b``
column-major. For y = x W^T, with x (tokens, in), W (out, in) and dy (tokens, out) stored row-major, that needs:

=====================  =====================  ======================
GEMM                   a, row-major           b, column-major
=====================  =====================  ======================
y  = x W^T             x                      W, seen transposed
dx = dy W              dy                     W's transposed copy
dW = dy^T x            dy's transposed copy   x's transposed copy
=====================  =====================  ======================

So backward reads x and W in their transposed copies only, and only these copies are saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxprec.ir.operators import Moves, moving_as
from fxprec.ir.symbolic import QUANTIZE, Dequantize, KeepNonfinite, is_in_blocks
from fxprec.numerics.formats import Format, parse
from fxprec.passes.analysis.joint import factors_of, input_at, tensor_of, value

aten = torch.ops.aten
MATMULS = frozenset({aten.mm.default, aten.addmm.default})
BATCHED = frozenset({aten.bmm.default, aten.baddbmm.default})
FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_ALIGNMENT = 16  # bytes; torch._scaled_mm refuses other sizes
# Views that show the same memory in another shape, without a copy.
PURE_VIEWS = moving_as(Moves.SHAPE, Moves.ORDER, Moves.RANK, Moves.ALIAS) - {aten.squeeze.default, aten.squeeze.dims}

Layout = Literal["rows", "columns"]


@dataclass(frozen=True)
class Coded:
    """An operand of a GEMM that is read back from codes."""

    q: Node
    """The operand's quantize node."""
    fmt: Format
    row: int
    """Row of the table whose scale the decode takes off, or ``AS_STORED``."""
    layout: Layout
    """``rows``: the operand is ``q`` as a row-major matrix; ``columns``: the operand is that matrix transposed."""
    source: Node | None
    """The unrounded tensor, if the operand is a gradient whose codes must keep inf and NaN; else None."""
    table: Node

    @property
    def is_fp8(self) -> bool:
        """Return whether the codes are a torch dtype of 8-bit floats that tensor cores multiply."""
        return self.fmt.torch_dtype in FP8


def operands(gemm: Node) -> tuple[Node, Node]:
    """Return the two factors of a GEMM in `MATMULS`."""
    first, second = factors_of(gemm)
    return first, second


def coded(operand: Node) -> Coded | str:
    """Return the codes behind a GEMM's operand, or the reason why a kernel cannot multiply codes."""
    node = operand
    while node.target in PURE_VIEWS:
        node = input_at(node, 0)
    kept = KeepNonfinite.match(node)
    source = None if kept is None else kept.x
    read = Dequantize.match(node if kept is None else kept.rounded)
    if read is None or is_in_blocks(read.format):
        return "an operand is not stored in a planned format"
    q, fmt = read.q, parse(read.format)
    if q.target is not QUANTIZE or fmt.bits > 16:
        return f"an operand is {fmt.name}"
    if source is not None and fmt.nan_code is None:
        return f"{fmt.name} has no code for the inf and NaN of a gradient"
    layout = layout_of(q, operand)
    if layout is None:
        return "an operand is a copy in another layout"
    return Coded(q, fmt, read.row, layout, source, read.table)


def layout_of(q: Node, operand: Node) -> Layout | None:
    """Return the layout of a GEMM's operand in the tensor ``q`` that it shows, or None if it is no view of it."""
    stored, seen = value(q), value(operand)
    if stored is None or seen is None or seen.ndim != 2 or not stored.ndim or not isinstance(stored.shape[-1], int):
        return None
    last = stored.shape[-1]
    if not _is_row_major(stored):
        return None
    if _same((seen.shape[1], *seen.stride()), (last, last, 1)):
        return "rows"
    return "columns" if _same((seen.shape[0], *seen.stride()), (last, 1, last)) else None


def _is_row_major(x: torch.Tensor) -> bool:
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not _same((stride,), (expected,)):
            return False
        expected = expected * size
    return True


def _same(found: tuple[int | torch.SymInt, ...], wanted: tuple[int | torch.SymInt, ...]) -> bool:
    return all(bool(statically_known_true(a == b)) for a, b in zip(found, wanted, strict=True))


def native_refusal(a: Coded, b: Coded, gemm: Node) -> str | None:
    """Return why ``torch._scaled_mm`` cannot multiply the codes, or None if it can."""
    if not (a.is_fp8 and b.is_fp8):
        return f"{a.fmt.name} and {b.fmt.name} are not hardware formats"
    if a.fmt.torch_dtype == b.fmt.torch_dtype == torch.float8_e5m2:
        return "no hardware multiplies e5m2 by e5m2"
    left, right = map(tensor_of, operands(gemm))
    sizes = (left.shape[1], right.shape[1])
    if not all(bool(statically_known_true(size % _ALIGNMENT == 0)) for size in sizes):
        return f"K = {sizes[0]} and N = {sizes[1]} are not both multiples of {_ALIGNMENT}"
    return None


def is_plain(gemm: Node) -> bool:
    """Return whether a GEMM in `MATMULS` is a product plus bias and no more."""
    if gemm.kwargs or len(gemm.args) > 3:
        return False
    if gemm.target is aten.mm.default:
        return True
    bias = value(input_at(gemm, 0))
    return bias is not None and bias.ndim == 1
