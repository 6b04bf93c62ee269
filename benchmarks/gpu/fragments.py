"""Pieces of a training step's graph, lowered as fxprec lowers them and compiled by Inductor."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxprec.driver.compilation  # noqa: F401  registers the symbolic ops
from benchmarks.gpu.suite import Setting
from fxprec import compat
from fxprec.ir.symbolic import AS_STORED
from fxprec.numerics.formats import parse
from fxprec.numerics.rows import format_row
from fxprec.passes.lowering.lower import lower
from fxprec.passes.lowering.rows import WatchedRows

aten = torch.ops.aten


def table_of(formats: list[str], device: torch.device, exponent: int = 0) -> Tensor:
    """Return a scale table with a row for each format."""
    rows = [[exponent, *format_row(parse(name))[1:], 0, 0] for name in formats]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def quantize(x: Tensor, table: Tensor, row: int, fmt: str) -> Tensor:
    return torch.ops.fxprec.quantize(x.float(), table, row, fmt, storage_of(fmt, x.device))


def dequantize(q: Tensor, table: Tensor, fmt: str) -> Tensor:
    return torch.ops.fxprec.dequantize(q, table, AS_STORED, fmt, storage_of(fmt, q.device), torch.float32)


def storage_of(fmt: str, device: torch.device) -> str:
    """Return how Inductor's code for a device holds a format: without 8-bit floats as packed codes, the same bits."""
    return "packed" if parse(fmt).torch_dtype is None or compat.no_native_fp8(device) is not None else "native"


def compile_fragment(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], setting: Setting, lowering: str = "inductor"
) -> Callable[[], Any]:
    """Return a call of ``function`` on ``inputs``, its casts lowered with the statistics of every row.

    Without a GPU the lowered graph is interpreted.
    """
    gm = make_fx(function, tracing_mode="fake", decomposition_table=_decompositions())(*inputs)
    # As on a GPU, also where a CPU stands in for one.
    lower(gm, lowering, "cuda", WatchedRows(watched=frozenset(range(8)), scaled=frozenset(range(8))))
    if not setting.compiles:
        return lambda: gm(*inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch._inductor.compile(gm, list(inputs))
    return lambda: compiled(*inputs)


def _decompositions() -> Any:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()
