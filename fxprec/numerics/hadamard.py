"""The random Hadamard matrix that both operands of a gradient's product are multiplied by (arXiv 2509.25149, 4.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.numerics.block_codec import random_bits

SIZE = 16
_NORMS = {size: size**-0.5 for size in (16, 32, 64, 128)}


def rotated(x: Tensor, seed: Tensor, size: int = SIZE) -> Tensor:
    """Return ``x`` as float32, each ``size`` elements of the last dimension times a random Hadamard matrix.

    ``size`` is 16, 32, 64 or 128. The matrix is orthogonal, so it cancels in a product. Its entries are +-1 /
    sqrt(size). The signs of its rows follow from ``seed`` (1,) int32.
    """
    at = torch.arange(size, device=x.device).to(torch.int32)
    signs = _sign(random_bits(at, seed))
    # Sylvester's matrix: the sign at (i, j) is the parity of the bits that i and j share.
    shared = at.view(size, 1) & at
    for shift in (4, 2, 1):
        shared = shared ^ (shared >> shift)
    matrix = _sign(shared) * (signs * _NORMS[size]).view(size, 1)
    return (x.to(torch.float32).reshape(-1, size) @ matrix).reshape(x.shape)


def _sign(bits: Tensor) -> Tensor:
    """Return -1 where the lowest bit is set, else 1."""
    return 1.0 - 2.0 * (bits & 1).to(torch.float32)
