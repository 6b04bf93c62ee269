"""The memory behind the parameters: local shards of DTensors, flat views of dense tensors, copies of others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def place_of(param: Tensor) -> tuple[int, ...]:
    """Which shard of a parameter this rank holds; replicas are the same place, so they draw the same random bits."""
    if not isinstance(param, DTensor):
        return ()
    coordinates = param.device_mesh.get_coordinate() or ()
    return tuple(c for c, placement in zip(coordinates, param.placements, strict=False) if placement.is_shard())


def dense_rows(rows: list[list[Tensor]]) -> list[list[Tensor]]:
    """Return each row's local tensors as flat memory in one common order, copied where theirs is another.

    Row element 0 is the parameter, 1 its gradient, which takes the parameter's dtype.
    """
    return [_dense_row([_local(t) for t in row]) for row in rows]


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _dense_row(row: list[Tensor]) -> list[Tensor]:
    param = row[0].detach()
    if param.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(param):
        return [t.detach().to(param.dtype).contiguous().view(-1) for t in row]
    return [_in_order_of(t.detach().to(param.dtype), param) for t in row]


def _in_order_of(t: Tensor, param: Tensor) -> Tensor:
    """A dense tensor with the strides of ``param``, read front to back."""
    if t.stride() != param.stride():
        t = torch.empty_like(param).copy_(t)
    return t.as_strided((t.numel(),), (1,))
