"""Reference implementations of casts to block formats: the codec's text, op by op, on any device.

What decides in doubt is `fxprec.numerics.block_reference`, which is too slow for a graph to run.
"""

from __future__ import annotations

import torch

from fxprec.ir.symbolic import TensorScale
from fxprec.numerics import block_codec
from fxprec.numerics.blocks import find_blocks


def quantize_blocks(
    x: torch.Tensor, seed: torch.Tensor | None, whole: torch.Tensor | None, row: int, format: str
) -> torch.Tensor:
    fmt = find_blocks(format)
    own_seed = None if seed is None else block_codec.salted(seed, row)
    return block_codec.records(block_codec.encode(x, fmt, whole, own_seed), fmt)


def dequantize_blocks(
    q: torch.Tensor, whole: torch.Tensor | None, row: int, format: str, elements: int, dtype: torch.dtype
) -> torch.Tensor:
    fmt = find_blocks(format)
    return block_codec.decode(block_codec.from_records(q, fmt), fmt, elements, whole).to(dtype)


def tensor_scale(x: torch.Tensor, format: str) -> torch.Tensor:
    return block_codec.tensor_scale(x, find_blocks(format))


TensorScale.implement(tensor_scale)
