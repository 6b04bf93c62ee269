"""Measure the bias of one cast of a graph from its input and its stored result."""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.ir.symbolic import AS_STORED, DEQUANTIZE, Quantize
from fxprec.numerics.bias import Bias, bias, block_bias
from fxprec.numerics.blocks import AnyFormat, BlockFormat


def cast_bias(
    x: Tensor, stored: Tensor, call: Quantize, fmt: AnyFormat, table: Tensor, whole: Tensor | None = None
) -> Bias:
    """Return the bias of a cast of ``x`` to ``fmt``. ``stored``: codes, a carrier of them, or `block_codec.records`.

    ``table`` has the scale of the cast's row; ``whole`` is the tensor scale of a block format. ``stored`` has the
    shape of ``x``, or of the records.
    """
    if isinstance(fmt, BlockFormat):
        return block_bias(x, stored, fmt, whole)
    read = (
        stored if call.is_simulated else DEQUANTIZE(stored, table, AS_STORED, call.format, call.storage, torch.float32)
    )
    return bias(x.double() * 2.0 ** int(table[call.row, 0]), read, fmt)
