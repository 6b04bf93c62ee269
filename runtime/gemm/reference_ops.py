"""Reference implementations of the symbolic GEMM ops: plain float32, on any device. The eager lowering runs them."""

from __future__ import annotations

import torch

from fxprec.formats import parse
from fxprec.runtime.reference import reference_decode
from fxprec.symbolic import AS_STORED, CARRIED, UNMEASURED


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
    over, under, bits, elements = counts.tolist()
    amax = torch.tensor(bits, dtype=torch.int32).view(torch.float32).item() * 2.0 ** -int(table[row, CARRIED])
    share = max(elements, 1)
    values = [over / share, under / share, amax, *UNMEASURED]
    return torch.tensor(values, dtype=torch.float32, device=counts.device)


def _numbers(codes: torch.Tensor, table: torch.Tensor, row: int, format: str) -> torch.Tensor:
    fmt = parse(format)
    exponent = 0 if row == AS_STORED else int(table[row, 0])
    return reference_decode(codes.view(fmt.code_dtype), fmt) * 2.0**-exponent


for _function in (gemm, transposed, counted_stats):
    torch.library.impl(f"fxprec::{_function.__name__}", "CompositeExplicitAutograd", _function)
