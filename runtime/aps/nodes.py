"""Average a bucket in two levels: in 16 bits between the ranks of a node, in codes between nodes.

Each rank of a node adds a chunk of the bucket, exchanges it with the ranks of other nodes that add the same chunk, and
sends the mean to its node. A node of k ranks then sends 2 (G - 1) / G codes an element to G - 1 other nodes, where k
rings or all-to-alls over all ranks would send up to k times as many (docs/aps.md).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fxprec.runtime.aps.bucket import Bucket, Exchange, reduce_plain
from fxprec.runtime.aps.exchange import all_gather, write_back
from fxprec.runtime.aps.groups import Node
from fxprec.runtime.aps.layout import Layout, layout, sizes_of
from fxprec.runtime.aps.state import APSState

INSIDE = torch.bfloat16
"""What gradients, and later their means, are sent as inside a node."""


class NodeExchange:
    """The mean over ranks of one bucket, by way of nodes; scheduled as `Exchange` is.

    All ranks of a node decode the same bytes of each chunk, and the ranks of one chunk have the same mean, so replicas
    stay bit-identical.
    """

    STAGES = ("add", *Exchange.STAGES, "share")

    def __init__(self, state: APSState, bucket: Bucket, node: Node) -> None:
        self._state, self._bucket, self._node = state, bucket, node
        self._layout: Layout = layout(sizes_of(bucket.low), node.size)
        self._work: dist.Work | None = None
        self._chunk = torch.empty(0, dtype=torch.float32, device="cpu")
        self._between: Exchange | None = None

    def start(self) -> None:
        """Begin to send each rank of the node its chunk."""
        if not self._bucket.low:
            return
        flat = torch.cat([view.reshape(-1).to(INSIDE) for view in self._bucket.low])
        rows = torch.cat([flat, flat.new_zeros(self._layout.padded - flat.numel())]).view(torch.uint8)
        self._received = torch.empty_like(rows)
        self._work = dist.all_to_all_single(self._received, rows, group=self._node.scatter, async_op=True)

    def add(self) -> None:
        """Average this rank's chunk over the node in float32, and begin its exchange between nodes."""
        if self._work is None:
            return
        self._work.wait()
        rows = self._received.view(INSIDE).view(self._node.size, -1)
        self._chunk = rows.sum(0, dtype=torch.float32).div_(self._node.size)
        owned = self._layout.owned(self._node.rank)
        begin = self._node.rank * self._layout.chunk
        part = Bucket(
            self._bucket.index,
            self._chunk,
            [self._chunk[piece.start - begin : piece.end - begin] for piece in owned],
            {},
            [self._bucket.parameters[piece.layer] for piece in owned],
            self._bucket.wire,
            self._bucket.part,
        )
        self._between = Exchange(self._state, part, self._node.between)
        self._between.start()

    def prepare(self) -> None:
        """See `Exchange.prepare`."""
        if self._between is not None:
            self._between.prepare()

    def scatter(self) -> None:
        """See `Exchange.scatter`; layers that are not coded are added over all ranks at once."""
        reduce_plain(self._bucket, self._state.groups)
        if self._between is not None:
            self._between.scatter()

    def reduce(self) -> None:
        """See `Exchange.reduce`."""
        if self._between is not None:
            self._between.reduce()

    def gather(self) -> None:
        """See `Exchange.gather`."""
        if self._between is not None:
            self._between.gather()

    def finish(self) -> None:
        """Decode the chunk's mean over nodes."""
        if self._between is not None:
            self._between.finish()

    def share(self) -> None:
        """Send the chunk to the node, and write all chunks into the bucket's buffer."""
        if self._work is None:
            return
        mean = all_gather(self._chunk.to(INSIDE).view(torch.uint8), self._node.gather).view(INSIDE).reshape(-1)
        write_back(mean[: self._layout.total], self._bucket.low)
