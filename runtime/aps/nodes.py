"""Exchange by nodes: each rank averages a chunk over its node, and later sends the chunk's mean to the node.

A node of k ranks then sends 2 (G - 1) / G elements per element of a bucket to G - 1 other nodes. With k rings or
all-to-alls over all ranks, a node would send up to k times as many (docs/aps.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fxprec.runtime.aps.exchange import all_gather
from fxprec.runtime.aps.groups import Groups, Node, communication_device
from fxprec.runtime.aps.layout import Layout, layout


class Inside:
    """The exchange of flat layers of these sizes inside of a node, in a dtype."""

    def __init__(self, node: Node, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        self._node = node
        self._dtype = dtype
        self._layout: Layout = layout(sizes, node.size)
        self._pieces = self._layout.owned(node.rank)
        self._rows = torch.empty(0, dtype=dtype, device="cpu")
        self._chunk = torch.empty(0, dtype=torch.float32, device="cpu")
        self._work: dist.Work | None = None

    @property
    def layer_of(self) -> tuple[int, ...]:
        """Return the layer of each piece of this rank's chunk."""
        return tuple(piece.layer for piece in self._pieces)

    def start(self, flat: Tensor) -> None:
        """Start to send each rank of the node its chunk."""
        sent = flat.new_empty(self._layout.padded, dtype=self._dtype)
        sent[: flat.numel()].copy_(flat)
        sent[flat.numel() :].zero_()
        self._rows = torch.empty_like(sent)
        received, sent = self._rows.view(torch.uint8), sent.view(torch.uint8)
        self._work = dist.all_to_all_single(received, sent, group=self._node.scatter, async_op=True)

    def mean(self) -> list[Tensor]:
        """Return the pieces of this rank's chunk, averaged over the node, in float32 or wider."""
        assert self._work is not None
        self._work.wait()
        wide = torch.promote_types(self._dtype, torch.float32)
        self._chunk = self._rows.view(self._node.size, -1).sum(0, dtype=wide).div_(self._node.size)
        begin = self._node.rank * self._layout.chunk
        return [self._chunk[piece.start - begin : piece.end - begin] for piece in self._pieces]

    def share(self, flat: Tensor) -> None:
        """Send the pieces, now means over all nodes, to the node, and write the pieces of its ranks into `flat`."""
        mean = all_gather(self._chunk.to(self._dtype).view(torch.uint8), self._node.gather).view(self._dtype)
        flat.copy_(mean.reshape(-1)[: flat.numel()])

    def rounded(self, values: Tensor) -> Tensor:
        """Return float32 values as rounded by a transfer inside of the node."""
        return values.to(self._dtype).to(torch.float32)

    def owed(self, lost: list[Tensor]) -> list[Tensor]:
        """Return this rank's residual of each layer if the pieces of its chunk's mean lost `lost`.

        A `size`-th of one rank's gradient is in the mean over the node, so losses are multiplied by `size`.
        """
        flat = self._chunk.new_zeros(self._layout.total)
        for piece, part in zip(self._pieces, lost, strict=True):
            torch.mul(part, self._node.size, out=flat[piece.start : piece.end])
        return self._layout.layers(flat)


def sums_inside(rows: Tensor, node: Node, dtype: torch.dtype) -> Tensor:
    """Return the node's sum of each row that this rank passes on, (nodes, n): one for its counterpart on each node.

    `rows` (ranks, n) has a row for each rank. They are sent in `dtype` and added in float32 or wider, in rank order.
    """
    sent = rows.view(-1, node.size, rows.shape[1]).transpose(0, 1).to(dtype).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=node.scatter)
    return received.sum(0, dtype=torch.promote_types(dtype, torch.float32))


@dataclass(frozen=True)
class Ranks:
    """The ranks of an all-gather, and their nodes if the group is all of them."""

    group: dist.ProcessGroup
    node: Node | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, groups: Groups) -> Ranks:
        """Return the ranks of FSDP2's group, which is that of the state's `groups` or another."""
        return cls(group, groups.node if dist.get_world_size(group) == groups.size else None)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Return this rank's number among them."""
        return dist.get_rank(self.group)

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors that they exchange."""
        return communication_device(self.group)

    def all_gather(self, message: Tensor) -> Tensor:
        """Return every rank's message (n,) as a row (ranks, n); if there are nodes, each message enters one once."""
        if self.node is None:
            return all_gather(message, self.group)
        between = all_gather(message, self.node.between.gather)
        rows = all_gather(between.view(-1), self.node.gather)
        return rows.view(self.node.size, len(between), -1).transpose(0, 1).reshape(-1, message.numel())
