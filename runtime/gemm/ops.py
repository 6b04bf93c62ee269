"""Implement the kernels' ops of compiled graphs. On a CPU the kernels run in Triton's interpreter, or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fxprec import compat
from fxprec.errors import LoweringError
from fxprec.ir.calls import Call
from fxprec.ir.symbolic import AS_STORED, stored_dtype
from fxprec.kernels.coded_gemms import MatmulCodes, MatmulToCodes, QuantizeTranspose, TransposeCodes
from fxprec.kernels.counts import Gathered, Totals
from fxprec.numerics import stats
from fxprec.numerics.formats import parse

if TYPE_CHECKING:
    from fxprec.runtime.gemm.launch import Alternatives
    from fxprec.runtime.gemm.matmul import Operand


def quantize_transpose(
    x: torch.Tensor,
    table: torch.Tensor,
    row: int,
    format: str,
    storage: str,
    keep: bool,
    row_major: bool,
    stats: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes of ``x``, their transpose and striped counters, in one kernel. Raises `LoweringError` off a GPU."""
    from fxprec.runtime.gemm import transpose

    _check_device(x)
    fmt = parse(format)
    dtype = stored_dtype(fmt, storage)
    wanted = {"keep": keep, "row_major": row_major, "stats": stats}
    q, t, counts = transpose.quantize_transpose(x.reshape(-1, x.shape[-1]), table.select(0, row), fmt, **wanted)
    return (q.view(x.shape) if row_major else q).view(dtype), t.view(dtype), counts


def transpose_codes(q: torch.Tensor) -> torch.Tensor:
    """Return the transpose of codes as a matrix (columns, rows). Raises `LoweringError` off a GPU."""
    from fxprec.runtime.gemm import transpose

    _check_device(q)
    return transpose.transpose(q.reshape(-1, q.shape[-1]))


def matmul_codes(
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
    """Return the product of stored operands, decoded and multiplied in one kernel. Raises `LoweringError` off a GPU."""
    from fxprec.runtime.gemm.matmul import matmul

    _check_device(a)
    return matmul(_operand(a, format_a, table, row_a), _operand(b, format_b, table, row_b), bias, dtype)[0]


def matmul_to_codes(
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
    """Return the product as codes, and striped counters. Raises `LoweringError` off a GPU."""
    from fxprec.runtime.gemm.matmul import Output, matmul

    _check_device(a)
    out = Output(parse(format), table.select(0, row), keep, stats)
    operands = _operand(a, format_a, table, row_a), _operand(b, format_b, table, row_b)
    q, counts = matmul(*operands, bias, dtype, out)
    return q.view(stored_dtype(out.fmt, storage)), counts


def totals(
    counts: torch.Tensor,
    moments: torch.Tensor,
    table: torch.Tensor,
    rows: Sequence[int],
    sizes: Sequence[int],
    elements: Sequence[int],
    measured: Sequence[bool],
    scaled: Sequence[bool],
    short: Sequence[bool],
) -> torch.Tensor:
    """Add up the counts of each tensor's parts to rows of counts, flat float64; on a CPU by plain torch."""
    sites = _sites(*map(tuple, (rows, sizes, elements, measured, scaled, short)))
    if counts.device.type != "cuda" and not compat.triton_interprets():
        return stats.totals(counts, moments, table, sites).flatten()
    from fxprec.runtime.gemm import totals

    return totals.totals(counts, moments, table, sites).flatten()


@functools.lru_cache(maxsize=1024)
def _sites(*facts: tuple[Any, ...]) -> tuple[stats.PartsOf, ...]:
    """Return `stats.parts_of`, which takes longer than a launch where a graph has many casts."""
    return stats.parts_of(*facts)


def gathered(counters: torch.Tensor) -> torch.Tensor:
    """Add up striped counters to rows of counts, flat float64."""
    from fxprec.runtime.gemm import totals

    return totals.gathered(counters).flatten()


def _operand(codes: torch.Tensor, format: str, table: torch.Tensor, row: int) -> Operand:
    from fxprec.runtime.gemm.matmul import Operand

    fmt = parse(format)
    return Operand(codes.view(fmt.code_dtype), fmt, None if row == AS_STORED else table.select(0, row).select(0, 0))


def _check_device(x: torch.Tensor) -> None:
    if x.device.type != "cuda" and not compat.triton_interprets():
        raise LoweringError(
            f"Triton kernels do not run on {x.device.type!r}; move the tensors to 'cuda', or set TRITON_INTERPRET=1 "
            "before the first import to run them in the interpreter"
        )


def _named(function: Callable[..., object]) -> Callable[..., object]:
    """Wrap ``function`` so that Triton's own errors become one line with the kernel, the cause and the way out."""

    @functools.wraps(function)
    def call(first: torch.Tensor, *args: object) -> object:
        try:
            return function(first, *args)
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "triton":
                raise
            cause = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise LoweringError(
                f"the Triton kernel of fxprec::{function.__name__} does not run on {_device_name(first)}: {cause}; "
                "compile with options={'gemms': 'high'}, which leaves GEMMs and casts to torch"
            ) from error

    return call


def _device_name(x: torch.Tensor) -> str:
    return torch.cuda.get_device_name(x.device) if x.device.type == "cuda" else str(x.device)


_FUNCTIONS: dict[type[Call], Callable[..., object]] = {
    QuantizeTranspose: quantize_transpose,
    TransposeCodes: transpose_codes,
    MatmulCodes: matmul_codes,
    MatmulToCodes: matmul_to_codes,
    Totals: totals,
    Gathered: gathered,
}
for _call, _function in _FUNCTIONS.items():
    _call.implement(_named(_function), *(("CUDA",) if _call is Gathered else ("CPU", "CUDA")))


def launches_of(call: type[Call], args: Sequence[object]) -> list[Alternatives]:
    """Return the launches of an operator for these arguments, fake tensors on a GPU. Nothing is started."""
    from fxprec.runtime.gemm.launch import noting

    with noting() as found:
        _FUNCTIONS[call](*args)
    return found
