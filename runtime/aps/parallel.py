"""Activations and their gradients in 8 bits for model parallelism: differentiable collectives of codes.

Source: Dettmers 2016, sections 2.2 and 3. Each rank codes its tensor with a scale of its own, sent beside the codes;
sums are made in float32 and coded once more. Rounding is straight-through: the derivative is that of the collective.
All ranks get the same bits. Shapes are equal on all ranks. A tensor with an inf or a NaN arrives as NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxprec.errors import ConfigError
from fxprec.runtime.aps import codecs
from fxprec.runtime.aps.codecs import Codec, codec

_all_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
_SCALE_BYTES = 4


def _world(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group)


def _pack(x: Tensor, c: Codec) -> Tensor:
    """One message: the float32 scale, then a byte for each element."""
    codes, scale = codecs.encode(x, c)
    return torch.cat([scale.reshape(1).view(torch.uint8), codes.reshape(-1)])


def _unpack(messages: Tensor, c: Codec) -> Tensor:
    """Values (rows, elements) of messages (rows, 4 + elements)."""
    scales = messages[:, :_SCALE_BYTES].contiguous().view(torch.float32)
    return codecs.decode_values(messages[:, _SCALE_BYTES:], c) * scales


def _gather_rows(x: Tensor, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
    """Every rank's tensor, coded, as (world, elements)."""
    message = _pack(x, c)
    world = _world(group)
    out = message.new_empty(world * message.numel())
    _all_gather_into(out, message, group=group)
    return _unpack(out.view(world, -1), c)


def _exchange_rows(rows: Tensor, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
    """All-to-all of the rows (world, elements): row r goes to rank r; the result's row r came from rank r."""
    message = torch.cat([_pack(row, c) for row in rows.unbind()])
    out = torch.empty_like(message)
    dist.all_to_all_single(out, message, group=group)
    return _unpack(out.view(rows.shape[0], -1), c)


def _sum_over_ranks(x: Tensor, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
    """Sum of all ranks' tensors: codes to the owner of a chunk, added in float32, the sum's codes to everyone."""
    world = _world(group)
    chunk = -(-x.numel() // world)
    padded = torch.cat([x.reshape(-1).float(), x.new_zeros(world * chunk - x.numel(), dtype=torch.float32)])
    owned = _exchange_rows(padded.view(world, chunk), c, group).sum(0)
    return _gather_rows(owned, c, group).reshape(-1)[: x.numel()].view(x.shape).to(x.dtype)


def _concatenate(x: Tensor, dim: int, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
    rows = _gather_rows(x, c, group)
    return torch.cat([row.view(x.shape).to(x.dtype) for row in rows.unbind()], dim)


def _swap(x: Tensor, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
    world = _world(group)
    return _exchange_rows(x.reshape(world, -1), c, group).view(x.shape).to(x.dtype)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
        ctx.dim, ctx.codec, ctx.group = dim, c, group
        return _concatenate(x, dim, c, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        world = _world(ctx.group)
        rows = torch.stack([part.reshape(-1) for part in grad.float().chunk(world, ctx.dim)])
        shape = list(grad.shape)
        shape[ctx.dim] //= world
        return _exchange_rows(rows, ctx.codec, ctx.group).sum(0).view(shape).to(grad.dtype), None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, c: Codec, group: dist.ProcessGroup | None, forward: bool, backward: bool
    ) -> Tensor:
        ctx.codec, ctx.group, ctx.sums = c, group, backward
        return _sum_over_ranks(x, c, group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        result = _sum_over_ranks(grad, ctx.codec, ctx.group) if ctx.sums else grad
        return result, None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
        ctx.codec, ctx.group = c, group
        return _swap(x, c, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _swap(grad.contiguous(), ctx.codec, ctx.group), None, None


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    apply: Any = function.apply  # typed in some versions of torch only
    result: Tensor = apply(*arguments)
    return result


def all_gather(
    x: Tensor, dim: int = 0, *, data_type: str = "dynamic-tree", group: dist.ProcessGroup | None = None
) -> Tensor:
    """All ranks' tensors joined along `dim`, in rank order; the gradient is the sum of all ranks' for this part."""
    return _applied(_AllGather, x, dim, codec(data_type), group)


def all_reduce(x: Tensor, *, data_type: str = "dynamic-tree", group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum of all ranks' tensors; the gradient is the sum of all ranks' gradients."""
    return _applied(_AllReduce, x, codec(data_type), group, True, True)


def all_to_all(x: Tensor, *, data_type: str = "dynamic-tree", group: dist.ProcessGroup | None = None) -> Tensor:
    """Parts of dimension 0 sent to their ranks, and what came from each in rank order; the gradient goes back alike.

    Dimension 0 must be a multiple of the world size; raises `ConfigError` where it is not.
    """
    if x.dim() == 0 or x.shape[0] % _world(group):
        raise ConfigError(
            f"all_to_all of a tensor of shape {tuple(x.shape)} over {_world(group)} ranks: dimension 0 is shared out "
            "evenly; pad it to a multiple of the ranks"
        )
    return _applied(_AllToAll, x, codec(data_type), group)


def copy_to_group(x: Tensor, *, data_type: str = "dynamic-tree", group: dist.ProcessGroup | None = None) -> Tensor:
    """The tensor itself, at the entry of a column-parallel layer; its gradient is the sum of all ranks'."""
    return _applied(_AllReduce, x, codec(data_type), group, False, True)


def reduce_from_group(x: Tensor, *, data_type: str = "dynamic-tree", group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum of all ranks' tensors, at the exit of a row-parallel layer; each rank's gradient is the output's."""
    return _applied(_AllReduce, x, codec(data_type), group, True, False)
