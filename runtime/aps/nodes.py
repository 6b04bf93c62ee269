"""Average a bucket in two levels: in 16 bits between the ranks of a node, in codes between nodes.

Each rank of a node adds a chunk of the bucket, exchanges it with the ranks of other nodes that add the same chunk, and
sends the mean to its node. A node of k ranks then sends 2 (G - 1) / G codes an element to G - 1 other nodes, where k
rings or all-to-alls over all ranks would send up to k times as many (docs/aps.md).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from fxprec.runtime.aps.bucket import Bucket, Exchange, reduce_plain
from fxprec.runtime.aps.exchange import all_gather, write_back
from fxprec.runtime.aps.groups import Node
from fxprec.runtime.aps.layout import Layout, layout, sizes_of
from fxprec.runtime.aps.state import APSState

INSIDE = torch.bfloat16
"""What gradients, and later their means, are sent as inside a node."""


class NodeExchange(Exchange):
    """The mean over ranks of one bucket, by way of nodes: the exchange of a chunk, with a stage before and one after.

    All ranks of a node decode the same bytes of each chunk, and the ranks of one chunk have the same mean, so replicas
    stay bit-identical.
    """

    STAGES = ("add", *Exchange.STAGES, "share")

    def __init__(self, state: APSState, bucket: Bucket, node: Node) -> None:
        self._whole, self._node = bucket, node
        self._chunks: Layout = layout(sizes_of(bucket.low), node.size)
        device = bucket.buffer.device
        self._chunk = torch.empty(self._chunks.chunk, dtype=torch.float32, device=device)
        self._rows = torch.empty(0, dtype=INSIDE, device=device)
        self._inside: dist.Work | None = None
        begin = node.rank * self._chunks.chunk
        owned = self._chunks.owned(node.rank)
        pieces = [self._chunk[piece.start - begin : piece.end - begin] for piece in owned]
        parameters = [bucket.parameters[piece.layer] for piece in owned]
        part = replace(bucket, buffer=self._chunk, low=pieces, plain={}, parameters=parameters)
        super().__init__(state, part, node.between)

    def start(self) -> None:
        """Begin to send each rank of the node its chunk."""
        low = self._whole.low
        if not low:
            return
        gap = low[0].new_zeros(self._chunks.padded - self._chunks.total, dtype=INSIDE)
        sent = torch.cat([*(view.reshape(-1).to(INSIDE) for view in low), gap])
        self._rows = torch.empty_like(sent)
        received = self._rows.view(torch.uint8)
        self._inside = dist.all_to_all_single(received, sent.view(torch.uint8), group=self._node.scatter, async_op=True)

    def add(self) -> None:
        """Average this rank's chunk over the node in float32, and begin its exchange between nodes."""
        if self._inside is not None:
            self._inside.wait()
            torch.sum(self._rows.view(self._node.size, -1), 0, dtype=torch.float32, out=self._chunk)
            self._chunk.div_(self._node.size)
            super().start()

    def scatter(self) -> None:
        """See `Exchange.scatter`; layers that are not coded are added over all ranks at once."""
        reduce_plain(self._whole, self.state.groups)
        super().scatter()

    def share(self) -> None:
        """Send the chunk to the node, and write all chunks into the bucket's buffer."""
        if self._inside is not None:
            mean = all_gather(self._chunk.to(INSIDE).view(torch.uint8), self._node.gather).view(INSIDE).reshape(-1)
            write_back(mean[: self._chunks.total], self._whole.low)
