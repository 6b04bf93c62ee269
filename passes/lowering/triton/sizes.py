"""Sizes as ints, or as sympy expressions if a dimension is dynamic. Comparing them adds no guard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import sympy
import torch

Size: TypeAlias = int | sympy.Expr


def size_of(value: int | torch.SymInt) -> Size:
    """Return an int, or the expression of a SymInt."""
    if isinstance(value, torch.SymInt):
        expr = value.node.expr
        return int(expr) if expr.is_Integer else expr
    return value


def shape_of(val: torch.Tensor) -> tuple[Size, ...]:
    """Return the shape, with symbols for dynamic sizes."""
    return tuple(map(size_of, val.shape))


def strides_of(val: torch.Tensor) -> tuple[Size, ...]:
    """Return the strides in elements, with symbols for dynamic sizes."""
    return tuple(map(size_of, val.stride()))


def numel_of(val: torch.Tensor) -> Size:
    """Return the number of elements, as an expression if a size is dynamic."""
    return product(shape_of(val))


def product(sizes: Sequence[Size]) -> Size:
    """Return the product of sizes, as an int if it has no symbols."""
    found = math.prod(sizes)
    return int(found) if isinstance(found, sympy.Integer) else found


def aligned(shape: Sequence[Size], strides: Sequence[Size], to: Sequence[Size]) -> tuple[Size, ...] | None:
    """Return the strides with which a tensor is read as if expanded to ``to``; None if it cannot be expanded."""
    missing = len(to) - len(shape)
    if missing < 0:
        extra = shape[:-missing]
        if any(s != 1 for s in extra):
            return None
        return aligned(shape[-missing:], strides[-missing:], to)
    found: list[Size] = [0] * missing
    for size, stride, wanted in zip(shape, strides, to[missing:], strict=True):
        if size == wanted:
            found.append(stride)
        elif size == 1:
            found.append(0)
        else:
            return None
    return tuple(found)


def coalesced(shape: Sequence[Size], strides: Sequence[Size]) -> list[tuple[Size, Size]]:
    """Return (size, stride) from the outermost dimension inwards; dimensions that one stride covers are joined."""
    found: list[tuple[Size, Size]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found
