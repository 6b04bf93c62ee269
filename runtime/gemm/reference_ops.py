"""Reference implementations of the symbolic GEMM ops: plain float32, on any device. The eager lowering runs them."""

from __future__ import annotations

import math

import torch

from fxprec.ir.symbolic import AS_STORED, CARRIED, MEASURE, UNMEASURED
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
) -> torch.Tensor:
    product = _numbers(a, table, row_a, format_a) @ _numbers(b, table, row_b, format_b)
    return (product if bias is None else product + bias.to(torch.float32)).to(dtype)


def transposed(q: torch.Tensor) -> torch.Tensor:
    return q.reshape(-1, q.shape[-1]).t().contiguous()


def counted_stats(counts: torch.Tensor, table: torch.Tensor, row: int) -> torch.Tensor:
    over, under, bits, elements = counts[:4].tolist()
    amax = torch.tensor(bits, dtype=torch.int32).view(torch.float32).item() * 2.0 ** -int(table[row, CARRIED])
    share = max(elements, 1)
    moments = _moments(counts[4:].view(torch.float64).tolist(), elements, table[row].tolist())
    values = [over / share, under / share, amax, *moments]
    return torch.tensor(values, dtype=torch.float32, device=counts.device)


def _moments(sums: list[float], elements: int, row: list[int]) -> tuple[float, ...]:
    """As `fxprec.runtime.reference_ops.measured_moments`, from sums over what is stored."""
    nonzero, squares, logs, squared_logs = sums
    if not row[MEASURE] or nonzero < 0:
        return UNMEASURED
    if not nonzero:
        return (0.0, 0.0, 0.0, 0.0)
    exponent = row[0] + row[CARRIED]
    mean = logs / nonzero
    deviation = math.sqrt(max(squared_logs / nonzero - mean * mean, 0.0))
    rms = math.sqrt(squares / elements) * 2.0**-exponent
    return rms, nonzero / elements, mean - exponent * math.log(2), deviation


def _numbers(codes: torch.Tensor, table: torch.Tensor, row: int, format: str) -> torch.Tensor:
    fmt = parse(format)
    exponent = 0 if row == AS_STORED else int(table[row, 0])
    return reference_decode(codes.view(fmt.code_dtype), fmt) * 2.0**-exponent


for _function in (gemm, transposed, counted_stats):
    torch.library.impl(f"fxprec::{_function.__name__}", "CompositeExplicitAutograd", _function)
