"""Parameters of several shapes, what an optimizer makes of them, and a state that went through a file."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

SHAPES = ((33, 17), (5,), (0,), (), (3, 5, 2))


def weights(dtype: torch.dtype = torch.float32, shapes: Iterable[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in shapes]


def values(opt: Any) -> list[Tensor]:
    return [p.detach().clone() for group in opt.param_groups for p in group["params"]]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def through_file(state: Any, **how: Any) -> Any:
    """Return what a file holds of it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, **{"weights_only": True, **how})
