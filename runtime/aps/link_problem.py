"""Define the problem that a link plan solves: layers, widths, links, and the cost of each width for each layer.

Definitions: docs/algorithms.md, "Bits by link".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fxprec.runtime.aps.links import Links

MESSAGE_BYTES = 385
"""Bytes that a Gloo message adds to its payload on a rank's interface: its header, two notices that sender and receiver
are ready, acknowledgements, and the headers of TCP, IP and Ethernet. Measured with 2, 4 and 8 ranks: 370 to 400."""
ALL_REDUCE_SENDS = 4
"""Messages that a rank sends in Gloo's all-reduce for each other rank: 2 in each of 2 steps of the ring."""
STANDING = 19
"""Factor by which an error that repeats counts more than an error that each step draws anew. Momentum of 0.9 averages
the square of the latter to 1 / 19. Low rank misses about the same part of a gradient in the next step."""


@dataclass(frozen=True)
class Transport:
    """How gradients are averaged."""

    passes: int
    """2: gradients go to owners, and sums go back to all ranks. 1: gradients go to owners."""
    whole_buckets: bool
    """Whether all layers of a bucket have the same bits."""
    overlaps: bool
    """Whether backward continues during an exchange, also on a CPU."""


ALL_REDUCE = Transport(passes=2, whole_buckets=False, overlaps=True)
"""The transport of DistributedDataParallel."""
REDUCE_SCATTER = Transport(passes=1, whole_buckets=True, overlaps=False)
"""The transport of FSDP2, which waits for each exchange on a CPU."""


@dataclass(frozen=True)
class Width:
    """The costs of sending gradients in some number of bits, to all ranks alike or by nodes."""

    bits: int
    code_bytes: int
    """Bytes of a block's codes."""
    block: int = 1
    """Elements coded together; a layer is filled up to whole blocks."""
    encode: float = 0.0
    """Seconds per element to encode."""
    decode: float = 0.0
    """Seconds per element to add and decode what arrives."""
    messages: int = 3
    """Consecutive exchanges of a part between nodes, each with the link's latency: exponents, codes to owners, codes
    of the sum. Over Gloo an all-reduce takes as many as its ring has steps."""
    sends: int = 3
    """Messages that a rank sends to each other rank: 1 in each exchange, or `ALL_REDUCE_SENDS`. That large sums of
    codes are gathered in a ring, with 1 message more, is not counted."""
    sends_to_all: int = 0
    """By nodes: messages to all ranks, while `sends` are between nodes."""
    error: float = 0.0
    """Share of the squared norm that one rounding loses."""
    in_ring: bool = False
    """Whether every rank of a ring rounds the sum so far; else each rank's gradient and the sum are rounded once."""
    rounds_sums: bool = True
    """Whether sums are rounded too; False: only gradients."""
    floor: float = 0.0
    """Root mean square error of rounding an element however small, as a share of the largest element."""
    inside_bytes: int = 0
    """By nodes: bytes per element inside of a node. 0: layers go to all ranks alike."""
    inside_error: float = 0.0
    """Share of the squared norm that one rounding inside of a node loses."""
    low_rank: int = 0
    """Columns of the two matrices that a layer is sent as, both in this width. A layer that is no such matrix goes
    whole beside them. 0 sends elements."""

    @property
    def by_nodes(self) -> bool:
        """Return whether layers go by nodes."""
        return self.inside_bytes > 0

    def roundings(self, ranks: int, passes: int) -> float:
        """Return the mean's squared error, at most, relative to that of one rounding of one rank's gradient.

        Ranks round independently, so the error of their mean is 1 / ranks of one rank's error. The sum of k ranks is at
        most k times as long as one gradient. A ring rounds the sum for each k from 2 on; otherwise only the last sum is
        rounded, if any.
        """
        of_sums = (ranks + 1) * (2 * ranks + 1) / (6 * ranks) if self.in_ring else passes - 1
        return 1 / ranks + of_sums * self.rounds_sums

    def numbers_of(self, layer: Layer) -> int:
        """Return how many numbers are sent for a layer: its elements, or those of both matrices."""
        if self.low_rank and layer.columns:
            return self.low_rank * (layer.elements // layer.columns + layer.columns)
        return layer.elements

    def bytes_of(self, layer: Layer) -> int:
        """Return the bytes of a layer's codes."""
        return -(-self.numbers_of(layer) // self.block) * self.code_bytes


@dataclass(frozen=True)
class Layer:
    """A layer's gradient: its bucket, and its statistics over ranks."""

    name: str
    bucket: int
    elements: int
    squares: float
    """Mean over ranks of the gradient's squared norm."""
    amax: float
    weight: float = 1.0
    """Weight of the layer's squared error."""
    columns: int = 0
    """Columns of the matrix that the layer is in low rank; 0 if it goes whole."""
    missed: float = 0.0
    """Measured squared error of the mean in low rank with error feedback; 0 if the layer goes whole."""


@dataclass(frozen=True)
class Problem:
    """Everything that a plan is chosen from. `ready`: seconds until each bucket's gradients are complete, in order."""

    layers: tuple[Layer, ...]
    ready: tuple[float, ...]
    widths: tuple[Width, ...]
    links: Links
    ranks: int
    budget: float
    shares_cores: float = 0.0
    """Share of the work of exchanges that delays the backward pass: 1 if both run on the same busy cores, else 0."""
    transport: Transport = ALL_REDUCE
    feedback: bool = False
    """Whether ranks keep what coding took from a layer, and add it to the next gradient."""

    def traffic(self, width: Width) -> tuple[float, float]:
        """Return the bytes that a rank sends, and that its node sends to other nodes, per byte of codes.

        In a ring a node sends one stream. Otherwise a node sends all its ranks' codes for owners in other nodes. By
        nodes each of its ranks sends a chunk to the owners in other nodes.
        """
        passes, node, nodes = self.transport.passes, self.links.node, self.ranks // self.links.node
        if width.by_nodes:
            leaving = passes * (nodes - 1) / nodes
            return leaving / node, leaving
        own = passes * (self.ranks - 1) / self.ranks
        return own, own if width.in_ring else passes * node * (self.ranks - node) / self.ranks

    def bytes_sent(self, layer: Layer, width: Width) -> float:
        """Return the bytes that a rank sends of a layer."""
        return self.traffic(width)[0] * width.bytes_of(layer) + self.transport.passes * self._inside(
            layer.elements, width
        )

    def bytes_kept(self, layer: Layer, width: Width) -> int:
        """Return the bytes that a rank keeps of a layer: a residual and, in low rank, one of the two matrices."""
        if width.low_rank:
            return 4 * (layer.elements + width.low_rank * layer.columns) if layer.columns else 0
        return 4 * layer.elements if self.feedback and width.bits < 16 else 0

    def exchanges(self, width: Width) -> int:
        """Return the number of exchanges of a part, by nodes including those inside and that of exponents.

        An all-reduce counts as one.
        """
        own = 1 if width.in_ring else width.messages
        return own + self.transport.passes * width.by_nodes + (width.sends_to_all > 0)

    def headers(self, width: Width) -> int:
        """Return the bytes that a rank sends for a part beside the bytes of its layers."""
        peers = self.ranks - 1
        if not width.by_nodes:
            return width.sends * peers * MESSAGE_BYTES
        node, nodes = self.links.node, self.ranks // self.links.node
        inside = self.transport.passes * (node - 1)
        return (width.sends_to_all * peers + inside + width.sends * (nodes - 1)) * MESSAGE_BYTES

    def _inside(self, elements: int, width: Width) -> float:
        return width.inside_bytes * elements * (1 - 1 / self.links.node)

    @cached_property
    def once(self) -> int:
        """Return, one bit each, the widths whose layers of all buckets are exchanged together: those in low rank."""
        return sum(1 << k for k, width in enumerate(self.widths) if width.low_rank)

    @cached_property
    def norm(self) -> float:
        """Return the weighted squared norm of one rank's gradient, the unit of the budget."""
        return sum(layer.weight * layer.squares for layer in self.layers) or 1.0

    def error(self, layer: Layer, width: Width) -> float:
        """Return the weighted squared error of the layer's mean, in units of the budget."""
        lost = width.error * layer.squares + layer.elements * (width.floor * layer.amax) ** 2
        senders = self.ranks // self.links.node if width.by_nodes else self.ranks
        lost *= width.roundings(senders, self.transport.passes)
        if width.by_nodes:  # inside of the node each rank's gradient is rounded, and the mean where it comes back
            lost += width.inside_error * layer.squares * (1 / self.ranks + self.transport.passes - 1)
        if width.low_rank:
            lost += STANDING * layer.missed
        return layer.weight * lost / self.norm

    def transfer(self, layer: Layer, width: Width) -> float:
        """Return the seconds of the layer's bytes between nodes, or on a rank's own link if that takes longer."""
        (own, leaving), size, links = self.traffic(width), width.bytes_of(layer), self.links
        seconds = leaving * size / links.between.bytes_per_second
        return seconds if links.inside is None else max(seconds, own * size / links.inside.bytes_per_second)

    def inside(self, elements: int, width: Width) -> float:
        """Return the seconds that these elements take inside of the node once: before they leave it, or after."""
        rate = self.links.inside
        return 0.0 if rate is None else self._inside(elements, width) / rate.bytes_per_second

    def latency_inside(self, width: Width) -> float:
        """Return the latency that a part pays inside of the node once."""
        return self.links.inside.latency if width.by_nodes and self.links.inside is not None else 0.0
