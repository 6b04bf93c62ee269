"""Lay block scales out as tensor cores read them: tiles of 128 rows by 4 blocks, 32 x 4 x 4 (SWIZZLE_32_4_4).

In a tile of 512 bytes the scale of row r and block c lies at (r % 32) * 16 + (r // 32) * 4 + c. Source: cuBLAS,
"Block scaling factors layout".
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, BLOCKS = 128, 4


def swizzled(scales: Tensor) -> Tensor:
    """Return scales (.., rows, blocks), padded with zeros, as (.., tiles), one row of tiles after another."""
    *batch, rows, blocks = scales.shape
    padded = torch.constant_pad_nd(scales, [0, -blocks % BLOCKS, 0, -rows % ROWS])
    tiles = padded.view(*batch, padded.shape[-2] // ROWS, 4, 32, padded.shape[-1] // BLOCKS, BLOCKS)
    return tiles.transpose(-4, -2).reshape(*batch, -1)


def places(rows: int, blocks: int) -> Tensor:
    """Return the position of the scale of each row and block, (rows, blocks) int64: the definition, by element."""
    row = torch.arange(rows, device="cpu").view(-1, 1)
    block = torch.arange(blocks, device="cpu").view(1, -1)
    tile = row // ROWS * -(-blocks // BLOCKS) + block // BLOCKS
    return tile * ROWS * BLOCKS + row % 32 * 16 + row % ROWS // 32 * 4 + block % BLOCKS
