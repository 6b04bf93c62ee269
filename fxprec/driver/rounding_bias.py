"""Measure how biased one cast of a graph is, from what went in and what was stored."""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.ir.symbolic import AS_STORED, DEQUANTIZE, Quantize
from fxprec.numerics.bias import Bias, bias, block_bias
from fxprec.numerics.blocks import AnyFormat, BlockFormat


def cast_bias(
    x: Tensor, stored: Tensor, call: Quantize, fmt: AnyFormat, table: Tensor, whole: Tensor | None = None
) -> Bias:
    """Measure what a cast of ``x`` to ``fmt`` stored: its codes, a carrier of them, or `block_codec.records`.

    ``table`` has the scale of the cast's row, ``whole`` is that of a tensor in blocks. ``stored`` has the shape of
    ``x``, or that of the records.
    """
    if isinstance(fmt, BlockFormat):
        return block_bias(x, stored, fmt, whole)
    read = (
        stored if call.is_simulated else DEQUANTIZE(stored, table, AS_STORED, call.format, call.storage, torch.float32)
    )
    return bias(x.double() * 2.0 ** int(table[call.row, 0]), read, fmt)
