"""Booleans in one bit each: eight elements a byte, packed by operators that fuse with the loops around them.

Bit j of the bytes holds one slice of the tensor, the j-th of eight equal ones. So each operator reads or writes memory
in its order, and Inductor vectorises all of them. Adjacent elements in one byte would need a reduction over 8 elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IN_A_BYTE = 8


@dataclass(frozen=True)
class Bit:
    """The format of packed booleans."""

    bits: int = 1
    name: str = "bit"


BIT = Bit()


def folded(shape: Sequence[object]) -> tuple[int, int] | None:
    """Return the first and the last of the dimensions that are split into eight slices; None if no split is possible.

    One dimension is split if its size is a multiple of 8: the first, or else the innermost. Otherwise the fewest
    leading dimensions are split together. The last dimension is not split, since its elements are adjacent in memory;
    nor is an image's channels, which are adjacent in channels-last, if another dimension can be.
    """
    dims = len(shape) - 1
    alone = ((dim, dim) for dim in (*range(min(dims, 1)), *range(dims - 1, 0, -1)))
    together = ((first, last) for last in range(dims) for first in range(last - 1, -1, -1))
    return next((fold for fold in (*alone, *together) if _is_multiple(shape[fold[0] : fold[1] + 1])), None)


def _is_multiple(sizes: Sequence[object]) -> bool:
    known = [size for size in sizes if isinstance(size, int)]
    return len(known) == len(sizes) and math.prod(known) % IN_A_BYTE == 0


def split(shape: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Return the sizes before the folded dimensions, the eight slices of these, and the sizes behind."""
    fold = folded(shape)
    assert fold is not None, "asked before a tensor is packed"
    first, last = fold
    slices = [IN_A_BYTE, math.prod(shape[first : last + 1]) // IN_A_BYTE]
    return [*shape[:first]], slices, [*shape[last + 1 :]]


def packed_shape(shape: Sequence[int]) -> list[int]:
    """Return the shape of a packed tensor's bytes: ``shape`` with the folded dimensions as one, an eighth as long."""
    before, (_, size), behind = split(shape)
    return [*before, size, *behind]


def packed(x: Tensor) -> Tensor:
    """Pack booleans into uint8 bytes of `packed_shape`; ``x`` is in memory order."""
    before, slices, behind = split(x.shape)
    pieces = x.reshape(*before, *slices, *behind).unbind(len(before))
    return torch.stack([piece.to(torch.uint8) << j for j, piece in enumerate(pieces)]).sum(0, dtype=torch.uint8)


def unpacked(q: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the booleans of ``shape`` that `packed` packed."""
    before, _, behind = split(shape)
    place = torch.arange(IN_A_BYTE, dtype=torch.int32, device=q.device)
    bit = torch.ones_like(place) << place
    bit = bit.view(*[1] * len(before), IN_A_BYTE, 1, *[1] * len(behind))
    return ((q.to(torch.int32).unsqueeze(len(before)) & bit) != 0).reshape(*shape)
