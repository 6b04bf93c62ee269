"""Operators that store what only backward reads in a block format (`fxprec.numerics.blocks`).

``quantize_blocks(x, seed, whole, row, format) -> q``
    Encode the elements of ``x`` in row-major order, (blocks, bytes) uint8: a block's scale, offset and codes. ``seed``
    (1,) int32 rounds at random, each row in its own way; None rounds to nearest. ``whole`` is the tensor's scale, of
    formats that have one. The row is the site's; it has no scale in the table, since the blocks have their own.
``dequantize_blocks(q, whole, row, format, elements, dtype) -> x``
    Decode the first ``elements``, (elements,).
``tensor_scale(x, format) -> whole``
    The float32 (1,) that multiplies the scales of a tensor's blocks.

On CPU, lowering turns them into ``store_blocks`` and ``load_blocks``, compiled kernels of the same arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, Size
from fxprec.numerics.blocks import find_blocks


@dataclass(frozen=True)
class _Encoding(Call):
    x: Node
    seed: Node | None
    whole: Node | None
    row: int
    format: str


@dataclass(frozen=True)
class _Decoding(Call):
    q: Node
    whole: Node | None
    row: int
    format: str
    elements: Size
    dtype: torch.dtype


@dataclass(frozen=True)
class QuantizeBlocks(_Encoding, op="quantize_blocks"):
    pass


@dataclass(frozen=True)
class DequantizeBlocks(_Decoding, op="dequantize_blocks"):
    pass


@dataclass(frozen=True)
class StoreBlocks(_Encoding, op="store_blocks"):
    pass


@dataclass(frozen=True)
class LoadBlocks(_Decoding, op="load_blocks"):
    pass


@dataclass(frozen=True)
class TensorScale(Call, op="tensor_scale"):
    x: Node
    format: str


QUANTIZE_BLOCKS = QuantizeBlocks.target
DEQUANTIZE_BLOCKS = DequantizeBlocks.target
TENSOR_SCALE = TensorScale.target


@QuantizeBlocks.fake
@StoreBlocks.fake
def _(x: torch.Tensor, seed: torch.Tensor | None, whole: torch.Tensor | None, row: int, format: str) -> torch.Tensor:
    fmt = find_blocks(format)
    blocks = (x.numel() + fmt.block - 1) // fmt.block
    return x.new_empty((blocks, fmt.head_bytes + fmt.code_bytes), dtype=torch.uint8)


@DequantizeBlocks.fake
@LoadBlocks.fake
def _(
    q: torch.Tensor, whole: torch.Tensor | None, row: int, format: str, elements: int, dtype: torch.dtype
) -> torch.Tensor:
    return q.new_empty(elements, dtype=dtype)


@TensorScale.fake
def _(x: torch.Tensor, format: str) -> torch.Tensor:
    return x.new_empty(1, dtype=torch.float32)
