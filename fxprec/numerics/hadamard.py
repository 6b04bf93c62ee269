"""The random Hadamard matrix that both operands of a weight's gradient are multiplied by (arXiv 2509.25149, 4.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.numerics.block_codec import random_bits

SIZE = 16
_NORM = 0.25
"""1 / sqrt(16): the matrix is orthogonal, so that it cancels in a product."""


def rotated(x: Tensor, seed: Tensor) -> Tensor:
    """Return ``x`` as float32, each 16 elements of its last dimension times a random Hadamard matrix.

    The matrix has the entries 1/4 and -1/4. The signs of its rows follow from ``seed`` (1,) int32.
    """
    at = torch.arange(SIZE, device=x.device).to(torch.int32)
    signs = _sign(random_bits(at, seed))
    # Sylvester's matrix: the sign at (i, j) is the parity of the bits that i and j share.
    shared = at.view(SIZE, 1) & at
    shared = shared ^ (shared >> 2)
    matrix = _sign(shared ^ (shared >> 1)) * (signs * _NORM).view(SIZE, 1)
    return (x.to(torch.float32).reshape(-1, SIZE) @ matrix).reshape(x.shape)


def _sign(bits: Tensor) -> Tensor:
    """Return -1 where the lowest bit is set, else 1."""
    return 1.0 - 2.0 * (bits & 1).to(torch.float32)
