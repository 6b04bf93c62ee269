"""Rotate blocks of gradients by a Hadamard matrix with random signs, so that few bits suit all elements of a block.

A rotated element is a sum of the whole block with signs. So one large gradient no longer uses up the range of the
others, and a block's elements are nearly normally distributed. The rotation is linear: rotated gradients of ranks add
up to the rotated sum. Signs are equal on all ranks. Definitions: docs/algorithms.md, "Communication in 4 bits".
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.runtime.aps import kernels


def signs_of(seed: int, block: int, device: torch.device) -> Tensor:
    """Return the signs of a block's elements, float32 (block,) of -1 and 1."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randint(0, 2, (block,), generator=generator, device="cpu")
    return (2 * drawn - 1).to(torch.float32).to(device)


def rotate(x: Tensor, signs: Tensor) -> None:
    """Rotate float32 (n,), n a multiple of the block, in place: signs, then the matrix; norms hardly change."""
    _transform(x, signs * 2.0 ** -(_log2(signs) - _log2(signs) // 2), torch.ones_like(signs))


def rotate_back(x: Tensor, signs: Tensor) -> None:
    """Undo `rotate` in place, except for float32's rounding: the matrix, then signs."""
    _transform(x, torch.full_like(signs, 2.0 ** -(_log2(signs) // 2)), signs)


def growth(block: int) -> float:
    """Return the factor by which a rotated magnitude can exceed the largest magnitude of its block."""
    return 2.0 ** ((block.bit_length() - 1) // 2)


def _log2(signs: Tensor) -> int:
    return signs.numel().bit_length() - 1


def _transform(x: Tensor, before: Tensor, after: Tensor) -> None:
    """Multiply each block by `before`, the Hadamard matrix (butterflies, the index's top bit first) and `after`."""
    if kernels.usable(x):
        kernels.hadamard(x, before, after)
        return
    block = before.numel()
    blocks = x.view(-1, block) * before
    for _ in range(_log2(before)):
        upper, lower = blocks.view(-1, 2, block // 2).unbind(1)
        blocks = torch.stack([upper + lower, upper - lower], -1).view(-1, block)
    torch.mul(blocks, after, out=x.view(-1, block))
