"""Send activations and their gradients in 8 bits for model parallelism, by differentiable collectives of codes.

Source: Dettmers 2016, sections 2.2 and 3. Each rank codes its tensor with its own scale and sends it beside the codes.
Sums are computed in float32 and coded once more. Rounding is straight-through: the derivative is that of the
collective. All ranks get the same bits. Shapes must be equal on all ranks. A tensor with inf or NaN arrives as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fxprec.errors import ConfigError
from fxprec.runtime.aps import codecs
from fxprec.runtime.aps.codecs import Codec, codec
from fxprec.runtime.aps.exchange import all_gather_into

_SCALE_BYTES = 4


def _world(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group)


def _pack(x: Tensor, c: Codec) -> Tensor:
    """Return one message: the float32 scale, then a byte for each element."""
    codes, scale = codecs.encode(x, c)
    return torch.cat([scale.reshape(1).view(torch.uint8), codes.reshape(-1)])


def _unpack(messages: Tensor, c: Codec) -> Tensor:
    """Return the values (rows, elements) of messages (rows, 4 + elements)."""
    scales = messages[:, :_SCALE_BYTES].contiguous().view(torch.float32)
    return codecs.decode_values(messages[:, _SCALE_BYTES:], c) * scales


class _Gather:
    """An all-gather of every rank's coded tensor that is under way."""

    def __init__(self, x: Tensor, c: Codec, group: dist.ProcessGroup | None) -> None:
        self.codec, self.group = c, group
        self._message = _pack(x, c)  # kept until it is sent
        self._out = self._message.new_empty(_world(group) * self._message.numel())
        self._work: Any = all_gather_into(  # a `Work`, since it is asynchronous
            self._out, self._message, group=group, async_op=True
        )

    def rows(self) -> Tensor:
        """Wait, and return every rank's tensor (world, elements)."""
        self._work.wait()
        return _unpack(self._out.view(_world(self.group), -1), self.codec)


def _gather_rows(x: Tensor, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
    """Return every rank's tensor, coded, as (world, elements)."""
    return _Gather(x, c, group).rows()


def _exchange_rows(rows: Tensor, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
    """Send row r of (world, elements) to rank r; return the rows received, row r from rank r."""
    message = torch.cat([_pack(row, c) for row in rows.unbind()])
    out = torch.empty_like(message)
    dist.all_to_all_single(out, message, group=group)
    return _unpack(out.view(rows.shape[0], -1), c)


def _sum_over_ranks(x: Tensor, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of all ranks' tensors: codes go to a chunk's owner, are added in float32, and coded for all."""
    world = _world(group)
    chunk = -(-x.numel() // world)
    padded = torch.cat([x.reshape(-1).float(), x.new_zeros(world * chunk - x.numel(), dtype=torch.float32)])
    owned = _exchange_rows(padded.view(world, chunk), c, group).sum(0)
    return _gather_rows(owned, c, group).reshape(-1)[: x.numel()].view(x.shape).to(x.dtype)


def _concatenate(x: Tensor, dim: int, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
    rows = _gather_rows(x, c, group)
    return torch.cat([row.view(x.shape).to(x.dtype) for row in rows.unbind()], dim)


def _sum_of_parts(grad: Tensor, dim: int, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's part along `dim` of the sum of all ranks' tensors."""
    parts = grad.float().chunk(_world(group), dim)
    rows = torch.stack([part.reshape(-1) for part in parts])
    return _exchange_rows(rows, c, group).sum(0).view(parts[0].shape).to(grad.dtype)


def _swap(x: Tensor, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
    world = _world(group)
    return _exchange_rows(x.reshape(world, -1), c, group).view(x.shape).to(x.dtype)


class _Kept(Protocol):
    """The context that a forward saves for its backward."""

    codec: Codec
    group: dist.ProcessGroup | None
    dim: int
    sums: bool


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, x: Tensor, dim: int, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
        ctx.dim, ctx.codec, ctx.group = dim, c, group
        return _concatenate(x, dim, c, group)

    @staticmethod
    def backward(ctx: _Kept, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum_of_parts(grad, ctx.dim, ctx.codec, ctx.group), None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept, x: Tensor, c: Codec, group: dist.ProcessGroup | None, forward: bool, backward: bool
    ) -> Tensor:
        ctx.codec, ctx.group, ctx.sums = c, group, backward
        return _sum_over_ranks(x, c, group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: _Kept, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        result = _sum_over_ranks(grad, ctx.codec, ctx.group) if ctx.sums else grad
        return result, None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, x: Tensor, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
        ctx.codec, ctx.group = c, group
        return _swap(x, c, group)

    @staticmethod
    def backward(ctx: _Kept, grad: Tensor) -> tuple[Tensor, None, None]:
        return _swap(grad.contiguous(), ctx.codec, ctx.group), None, None


class _Arrive(torch.autograd.Function):
    """All ranks' samples of a sub-batch, in rank order; a rank's gradient is that of its own loss."""

    @staticmethod
    def forward(ctx: _Kept, part: Tensor, gather: _Gather) -> Tensor:
        ctx.codec, ctx.group = gather.codec, gather.group
        return gather.rows().view(-1, *part.shape[1:]).to(part.dtype)

    @staticmethod
    def backward(ctx: _Kept, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_of_parts(grad, 0, ctx.codec, ctx.group) * _world(ctx.group), None


class _OwnSamples(torch.autograd.Function):
    """This rank's part of dimension 0; the gradient is that of the mean of all ranks' losses."""

    @staticmethod
    def forward(ctx: _Kept, y: Tensor, c: Codec, group: dist.ProcessGroup | None) -> Tensor:
        ctx.codec, ctx.group = c, group
        return y.chunk(_world(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: _Kept, grad: Tensor) -> tuple[Tensor, None, None]:
        return _concatenate(grad, 0, ctx.codec, ctx.group) / _world(ctx.group), None, None


def _applied(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    apply: Callable[..., Tensor] = function.apply  # typed in some versions of torch only
    return apply(*arguments)


def all_gather(
    x: Tensor, dim: int = 0, *, data_type: str = "dynamic-tree", group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return all ranks' tensors joined along `dim` in rank order; the gradient is the sum of all ranks' for this part.

    Raises `FormatError` for an unknown `data_type`.
    """
    return _applied(_AllGather, x, dim, codec(data_type), group)


def all_reduce(x: Tensor, *, data_type: str = "dynamic-tree", group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of all ranks' tensors, in their shape; the gradient is the sum of all ranks' gradients.

    Raises `FormatError` for an unknown `data_type`.
    """
    return _applied(_AllReduce, x, codec(data_type), group, True, True)


def all_to_all(x: Tensor, *, data_type: str = "dynamic-tree", group: dist.ProcessGroup | None = None) -> Tensor:
    """Send parts of dimension 0 to their ranks, return each rank's part in rank order; gradients go back alike.

    Dimension 0 must be a multiple of the world size; raises `ConfigError` otherwise.
    """
    if x.dim() == 0 or x.shape[0] % _world(group):
        raise ConfigError(
            f"all_to_all of a tensor of shape {tuple(x.shape)} over {_world(group)} ranks: dimension 0 is shared out "
            "evenly; pad it to a multiple of the ranks"
        )
    return _applied(_AllToAll, x, codec(data_type), group)


def copy_to_group(x: Tensor, *, data_type: str = "dynamic-tree", group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the tensor itself, for the entry of a column-parallel layer; its gradient is the sum of all ranks'.

    Raises `FormatError` for an unknown `data_type`.
    """
    return _applied(_AllReduce, x, codec(data_type), group, False, True)


def reduce_from_group(x: Tensor, *, data_type: str = "dynamic-tree", group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of all ranks' tensors, at the exit of a row-parallel layer; each rank's gradient is the output's.

    Raises `FormatError` for an unknown `data_type`.
    """
    return _applied(_AllReduce, x, codec(data_type), group, True, False)


def sub_batches(
    layers: Callable[[Tensor], Tensor],
    x: Tensor,
    count: int | None = None,
    *,
    data_type: str = "dynamic-tree",
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Run `layers`, split over the ranks, on this rank's samples x (batch, ...), in `count` sub-batches.

    Source: Dettmers 2016, section 2.4. A sub-batch takes batch / count samples of every rank. While `layers` compute a
    sub-batch, the activations of the next are on the wire. `count` defaults to the number of ranks, so that a sub-batch
    is as large as one rank's batch. `layers` map (samples, ...) to (samples, ...), end in `reduce_from_group` and begin
    without `copy_to_group`, because this function adds up the gradients of their input. Their weights get the gradient
    of the mean of all ranks' losses, and x gets that of this rank's loss, as DistributedDataParallel expects. Raises
    `ConfigError` if `count` does not divide the batch.
    """
    count = _world(group) if count is None else count
    if x.dim() == 0 or count < 1 or x.shape[0] % count or not x.shape[0]:
        raise ConfigError(
            f"sub_batches of a tensor of shape {tuple(x.shape)} in {count}: dimension 0 is cut into equal parts; "
            "choose a count that divides it"
        )
    kind, parts, found = codec(data_type), x.chunk(count), []
    coming = _Gather(parts[0], kind, group)
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        arrived = _applied(_Arrive, part, coming)
        if following is not None:
            coming = _Gather(following, kind, group)
        found.append(_applied(_OwnSamples, layers(arrived), kind, group))
    return torch.cat(found)
