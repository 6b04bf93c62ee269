"""Find the memory behind parameters: local shards of DTensors, flat views of dense tensors, copies of others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxprec.runtime.optim.rule import Rule


def place_of(param: Tensor) -> tuple[int, ...]:
    """Return which shard of a parameter this rank has. Replicas have the same place, so they draw the same bits."""
    if not isinstance(param, DTensor):
        return ()
    coordinates = param.device_mesh.get_coordinate() or ()
    return tuple(c for c, placement in zip(coordinates, param.placements, strict=False) if placement.is_shard())


def is_dense(rule: Rule, row: list[Tensor]) -> bool:
    """Return whether a row's own tensors already are flat memory in one common order; ``row`` is as in `dense_row`."""
    return all(
        t.is_contiguous() and not isinstance(t, DTensor) and t.dtype == rule.dtype_of(name)
        for name, t in zip(rule.tensors, row, strict=False)
    )


def dense_row(rule: Rule, row: list[Tensor]) -> list[Tensor]:
    """Return a row's local tensors as flat memory in one common order; a tensor in another order is copied.

    A row has `Rule.tensors`, then `Rule.scales`. Scales and `Rule.packed` are flat already. Other tensors are converted
    to the dtypes of the rule.
    """
    row = [local(t) for t in row]
    flat = [
        t if name in rule.packed else in_order_of(t.to(rule.dtype_of(name)), row[0])
        for name, t in zip(rule.tensors, row, strict=False)
    ]
    return [*flat, *row[len(flat) :]]


def local(t: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached."""
    return (t.to_local() if isinstance(t, DTensor) else t).detach()


def is_permuted(param: Tensor) -> bool:
    """Return whether a tensor's memory has no gaps but another order than its elements."""
    return not param.is_contiguous() and bool(torch.ops.aten.is_non_overlapping_and_dense(param))


def in_order_of(t: Tensor, param: Tensor) -> Tensor:
    """Return a tensor flat, in the order of the parameter's memory, or of its elements if the memory has gaps."""
    if not is_permuted(param):
        return t.contiguous().view(-1)
    if t.stride() != param.stride():
        t = torch.empty_like(param, dtype=t.dtype).copy_(t)
    return t.as_strided((t.numel(),), (1,))


def in_shape_of(flat: Tensor, param: Tensor) -> Tensor:
    """Return a result of `in_order_of` as a tensor of the parameter's shape."""
    return flat.as_strided(param.shape, param.stride()) if is_permuted(param) else flat.view(param.shape)
