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


def is_dense(row: list[Tensor]) -> bool:
    """Whether a row's own tensors are flat memory in one common order already. Row as for `dense_row`."""
    dtype = row[0].dtype
    return all(t.dtype == dtype and t.is_contiguous() and not isinstance(t, DTensor) for t in row)


def dense_row(row: list[Tensor]) -> list[Tensor]:
    """Return a row's local tensors as flat memory in one common order, copied where theirs is another.

    Row element 0 is the parameter, 1 its gradient, which takes the parameter's dtype.
    """
    row = [t.to_local() if isinstance(t, DTensor) else t for t in row]
    param = row[0].detach()
    if param.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(param):
        return [t.detach().to(param.dtype).contiguous().view(-1) for t in row]
    return [_in_order_of(t.detach().to(param.dtype), param) for t in row]


def _in_order_of(t: Tensor, param: Tensor) -> Tensor:
    """A dense tensor with the strides of ``param``, read front to back."""
    if t.stride() != param.stride():
        t = torch.empty_like(param).copy_(t)
    return t.as_strided((t.numel(),), (1,))
