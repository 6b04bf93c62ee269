"""Choose the bits of each layer's gradient so that the step ends soonest, and rounding stays within a budget.

Layers are sent in order of readiness. Each is encoded, transferred and decoded; each of the three stages takes one
layer at a time, so the step ends with the last decoding. What is transferred while backward still computes costs no
time, and bits are few only where the transfer would end the step later. Where ranks share nodes, a layer may also go by
nodes: what it sends inside of its node before and after belongs to the first and the last stage. Definitions:
docs/algorithms.md, "Bits by link".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fxprec.errors import BudgetError
from fxprec.runtime.aps.link_plan import LayerBits, LinkPlan
from fxprec.runtime.aps.links import Links

MAX_STATES = 128
"""Partial choices kept after each layer: 4 widths of 128 layers take half a second."""
MAX_ITEMS = 128
"""Smaller layers of a bucket are chosen for together, until about this many choices are left."""
CLOSE = 1.01
"""Plans that end within 1 % of the soonest count as equally soon; the one that rounds least is taken."""
_ROUND_OFF = 1 + 1e-12
MESSAGE_BYTES = 166
"""Bytes of a message beside its payload: Gloo's header (34), those of TCP, IP and Ethernet, and its acknowledgement."""
NEGLIGIBLE = 1e-3
"""Share of the budget below which errors count as equal; the plan that sends less is taken."""

STANDING = 19
"""How much more an error counts that stands still than one that each step draws anew: momentum of 0.9 averages the
latter's square to 1 / 19. What low rank misses of a gradient is about the same in the next step."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Transport:
    """How gradients are averaged."""

    passes: int
    """2: gradients go to owners, and sums back to all ranks. 1: gradients go to owners."""
    whole_buckets: bool
    """Whether all layers of a bucket have the same bits."""
    overlaps: bool
    """Whether backward goes on meanwhile, also on a CPU."""


ALL_REDUCE = Transport(passes=2, whole_buckets=False, overlaps=True)
"""DistributedDataParallel's."""
REDUCE_SCATTER = Transport(passes=1, whole_buckets=True, overlaps=False)
"""FSDP2's: on a CPU it waits for each exchange."""


@dataclass(frozen=True)
class Width:
    """What it costs to send gradients in so many bits, to all ranks alike or by nodes."""

    bits: int
    code_bytes: int
    """Bytes of a block's codes."""
    block: int = 1
    """Elements coded together; a layer is filled up to whole blocks."""
    encode: float = 0.0
    """Seconds an element to encode."""
    decode: float = 0.0
    """Seconds an element to add and decode what arrives."""
    messages: int = 3
    """Exchanges between nodes one after another, each with the link's latency: exponents, codes to owners, codes of
    the sum."""
    sends: int = 4
    """Messages that a rank sends to or by way of each other one: a ring's all-reduce takes 2."""
    sends_to_all: int = 0
    """By nodes: those to all ranks, where `sends` are between nodes."""
    error: float = 0.0
    """Share of the squared norm that one rounding loses."""
    in_ring: bool = False
    """Whether every rank of a ring rounds the sum so far; else each rank's gradient and the sum are rounded once."""
    rounds_sums: bool = True
    """False where gradients alone are rounded."""
    floor: float = 0.0
    """What one rounding loses of an element however small it is (root mean square), as a share of the largest one."""
    inside_bytes: int = 0
    """By nodes: bytes of an element inside of a node. 0 goes to all ranks alike."""
    inside_error: float = 0.0
    """Share of the squared norm that one rounding inside of a node loses."""
    low_rank: int = 0
    """Columns of the two matrices that a layer is sent as where it can be, both in this width; 0 sends elements."""

    @property
    def by_nodes(self) -> bool:
        """Say whether layers go by nodes."""
        return self.inside_bytes > 0

    @property
    def exchanges(self) -> int:
        """Return the exchanges of a part; by nodes also those inside, and that of exponents over all ranks."""
        return self.messages + 2 * self.by_nodes + (self.sends_to_all > 0)

    def roundings(self, ranks: int, passes: int) -> float:
        """Return what the mean loses, at most, of what one rounding of one rank's gradient does.

        Ranks round independently, so that of their mean is 1 / ranks of one rank's. The sum of k ranks is at most
        k times as long as one of them. In a ring it is rounded for each k from 2 on, else for the last one if at all.
        """
        of_sums = (ranks + 1) * (2 * ranks + 1) / (6 * ranks) if self.in_ring else passes - 1
        return 1 / ranks + of_sums * self.rounds_sums

    def rank_of(self, layer: Layer) -> int:
        """Return `low_rank` for a layer that can be sent so, else 0."""
        return self.low_rank if layer.columns else 0

    def numbers_of(self, layer: Layer) -> int:
        """Return the numbers that are sent of a layer: its elements, or those of both matrices."""
        rank = self.rank_of(layer)
        return rank * (layer.elements // layer.columns + layer.columns) if rank else layer.elements

    def bytes_of(self, layer: Layer) -> int:
        """Return the bytes of a layer's codes."""
        return -(-self.numbers_of(layer) // self.block) * self.code_bytes

    def bytes_kept(self, layer: Layer) -> int:
        """Return the bytes that a rank keeps of a layer in low rank: the residual, and one of the two matrices."""
        rank = self.rank_of(layer)
        return 4 * (layer.elements + rank * layer.columns) if rank else 0


@dataclass(frozen=True)
class Layer:
    """A layer's gradient: where it is sent, and its statistics over ranks."""

    name: str
    bucket: int
    elements: int
    squares: float
    """Mean over ranks of its squared norm."""
    amax: float
    weight: float = 1.0
    """What a unit of its squared error counts."""
    columns: int = 0
    """Columns of the matrix that it is where it can be sent in low rank, else 0."""
    missed: float = 0.0
    """Squared error of the mean in low rank, with error feedback; measured."""


@dataclass(frozen=True)
class Problem:
    """What a plan is chosen from. `ready` says when the gradients of each bucket are whole, in order of sending."""

    layers: tuple[Layer, ...]
    ready: tuple[float, ...]
    widths: tuple[Width, ...]
    links: Links
    ranks: int
    budget: float
    shares_cores: float = 0.0
    """Share of that work that delays the backward pass: 1 where both run on the same busy cores, else 0."""
    transport: Transport = ALL_REDUCE

    def traffic(self, width: Width) -> tuple[float, float]:
        """Return what a rank and what a node send, the node to others, of one byte of codes.

        A node sends one stream of a ring, and all ranks' codes for owners elsewhere. By nodes each of its ranks sends a
        chunk to the owners in other nodes.
        """
        passes, node, nodes = self.transport.passes, self.links.node, self.ranks // self.links.node
        if width.by_nodes:
            leaving = passes * (nodes - 1) / nodes
            return leaving / node, leaving
        own = passes * (self.ranks - 1) / self.ranks
        return own, own if width.in_ring else passes * node * (self.ranks - node) / self.ranks

    def bytes_sent(self, layer: Layer, width: Width) -> float:
        """Return the bytes that a rank sends of a layer."""
        return self.traffic(width)[0] * width.bytes_of(layer) + 2 * self._inside(layer.elements, width)

    def headers(self, width: Width) -> int:
        """Return the bytes that a rank sends of a part beside its layers'."""
        peers = self.ranks - 1
        if not width.by_nodes:
            return width.sends * peers * MESSAGE_BYTES
        node, nodes = self.links.node, self.ranks // self.links.node
        return (width.sends_to_all * peers + 2 * (node - 1) + width.sends * (nodes - 1)) * MESSAGE_BYTES

    def _inside(self, elements: int, width: Width) -> float:
        return width.inside_bytes * elements * (1 - 1 / self.links.node)

    @cached_property
    def once(self) -> int:
        """Return the widths, a bit each, whose layers of all buckets are exchanged together: those in low rank."""
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
        if width.by_nodes:  # of each rank's gradient, and of the mean
            lost += width.inside_error * layer.squares * (1 / self.ranks + 1)
        if width.rank_of(layer):
            lost += STANDING * layer.missed
        return layer.weight * lost / self.norm

    def transfer(self, layer: Layer, width: Width) -> float:
        """Return the seconds of the layer's bytes between nodes, or on a rank's own link where that takes longer."""
        (own, leaving), size, links = self.traffic(width), width.bytes_of(layer), self.links
        seconds = leaving * size / links.between.bytes_per_second
        return seconds if links.inside is None else max(seconds, own * size / links.inside.bytes_per_second)

    def inside(self, elements: int, width: Width) -> float:
        """Return the seconds of these elements inside of the node, before they go to other nodes, and again after."""
        rate = self.links.inside
        return 0.0 if rate is None else self._inside(elements, width) / rate.bytes_per_second

    def latency_inside(self, width: Width) -> float:
        """Return the latency that a part pays inside of the node, before and again after."""
        return self.links.inside.latency if width.by_nodes and self.links.inside is not None else 0.0


@dataclass
class States:
    """Partial choices, an entry each: when their stages are free, what they have cost, and how they came about."""

    encoder: Floats
    link: Floats
    decoder: Floats
    busy: Floats
    """Seconds of encoding, decoding and work on exchanges so far."""
    error: Floats
    used: NDArray[np.int64]
    """Widths used so far in the current bucket, a bit each: the first part of a width pays the latency."""
    parent: NDArray[np.int64]
    width: NDArray[np.int64]

    @classmethod
    def start(cls) -> States:
        """Return the choice of nothing."""
        zero, none = np.zeros(1), np.zeros(1, dtype=np.int64)
        return cls(zero, zero, zero, zero, zero, none, none, none)

    def __len__(self) -> int:
        return len(self.error)

    def take(self, index: NDArray[np.int64]) -> States:
        """Return these entries."""
        return States(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    @staticmethod
    def joined(parts: Sequence[States]) -> States:
        """Return the entries of all parts."""
        return States(*(np.concatenate([getattr(p, name) for p in parts]) for name in States.__dataclass_fields__))


def advance(states: States, problem: Problem, items: Sequence[Layer], number: int, begins: bool) -> States:
    """Return the states after these layers of one bucket are sent in the width of that number.

    `begins`: they are the first of their bucket.
    """
    width, bucket = problem.widths[number], items[0].bucket
    elements = sum(layer.elements for layer in items)
    encode, decode = elements * width.encode, elements * width.decode
    inside = problem.inside(elements, width)
    used = states.used & problem.once if begins else states.used
    first = (used >> number & 1) == 0
    transfer = sum(problem.transfer(layer, width) for layer in items)
    ready = problem.ready[bucket] + problem.shares_cores * states.busy
    pays = first * problem.latency_inside(width)
    encoder = np.maximum(states.encoder, ready) + encode + inside + pays
    link = np.maximum(states.link, encoder) + transfer + first * width.messages * problem.links.between.latency
    work = encode + decode + first * width.exchanges * problem.links.exchange
    return States(
        encoder,
        link,
        np.maximum(states.decoder, link) + decode + inside + pays,
        states.busy + work,
        states.error + sum(problem.error(layer, width) for layer in items),
        used | 1 << number,
        np.arange(len(states)),
        np.full(len(states), number),
    )


def end_of(states: States, problem: Problem) -> Floats:
    """Return when the step of each state ends: with the last decoding, and not before backward does."""
    return np.maximum(states.decoder, max(problem.ready, default=0.0) + problem.shares_cores * states.busy)


def alike(problem: Problem) -> list[LinkPlan]:
    """Return the plans of one width for all layers that keep the budget."""
    items = _items(problem)
    plans = [_run(problem, items, (n,) * len(items)) for n in range(len(problem.widths))]
    return [plan for plan in plans if plan.error <= problem.budget * _ROUND_OFF]


def choose(problem: Problem) -> LinkPlan:
    """Return the plan of least end within the budget. Raises `BudgetError` where no width keeps it.

    A dynamic program over layers: of partial choices that are nowhere better than another none is kept, and of the rest
    at most `MAX_STATES`. The result is never worse than any one width for all that keeps the budget.
    """
    items = _items(problem)
    least_left = np.cumsum([min(_error(problem, i, w) for w in problem.widths) for i in reversed(items)])[::-1]
    if items and least_left[0] > problem.budget:
        raise BudgetError(
            f"error_budget={problem.budget:.3g} cannot be met: the widest of {_all_bits(problem)} bits "
            f"loses {least_left[0]:.3g}; give a larger budget or a wider width"
        )
    states, trail = States.start(), []
    for k, item in enumerate(items):
        states = States.joined(
            [advance(states, problem, item, n, _begins(items, k)) for n in range(len(problem.widths))]
        )
        room = problem.budget - (least_left[k + 1] if k + 1 < len(items) else 0.0)
        states = _kept(states.take(np.flatnonzero(states.error <= room * _ROUND_OFF)))
        trail.append(states)
    ends, one_width = end_of(states, problem), alike(problem)
    soonest = min([float(ends.min()), *(p.end for p in one_width)])
    last = min(range(len(states)), key=_ranks(problem, ends, states.error, float(ends.min())).__getitem__)
    plans = [_run(problem, items, _way(trail, last)), *one_width]
    ranks = _ranks(problem, np.array([p.end for p in plans]), np.array([p.error for p in plans]), soonest)
    return min(zip(ranks, (p.bytes_sent for p in plans), range(len(plans)), plans, strict=True))[-1]


def _all_bits(problem: Problem) -> list[int]:
    return list(dict.fromkeys(width.bits for width in problem.widths))


def _ranks(problem: Problem, ends: Floats, errors: Floats, soonest: float) -> list[float]:
    """Return what to take the least of: the error of plans that end about as soon as `soonest`, else infinity."""
    close = ends <= soonest * CLOSE
    return [float(x) for x in np.where(close, np.maximum(errors, NEGLIGIBLE * problem.budget), np.inf)]


def _begins(items: Sequence[Sequence[Layer]], k: int) -> bool:
    """Say whether an item is the first of its bucket."""
    return k == 0 or items[k - 1][0].bucket != items[k][0].bucket


def _items(problem: Problem) -> list[list[Layer]]:
    """Return layers in groups that share a width: neighbours of one bucket, as long as they are small."""
    enough = sum(layer.elements for layer in problem.layers) / MAX_ITEMS
    items: list[list[Layer]] = []
    for layer in sorted(problem.layers, key=lambda layer: layer.bucket):
        together = items and items[-1][0].bucket == layer.bucket
        if together and (
            problem.transport.whole_buckets or sum(other.elements for other in items[-1]) + layer.elements <= enough
        ):
            items[-1].append(layer)
        else:
            items.append([layer])
    return items


def _error(problem: Problem, item: Sequence[Layer], width: Width) -> float:
    return sum(problem.error(layer, width) for layer in item)


def _kept(states: States) -> States:
    """Return the states that no other equals or beats in all, of too many the soonest of each range of errors."""
    names = ("encoder", "busy", "decoder", "link", "error")
    states = states.take(np.lexsort([getattr(states, name) for name in names]))
    beaten = (states.used[:, None] & states.used) == states.used  # the first has paid for all that the second has
    for name in names:
        cost = getattr(states, name)
        beaten &= cost[:, None] <= cost
    states = states.take(np.flatnonzero(~np.triu(beaten, 1).any(0)))
    if len(states) <= MAX_STATES:
        return states
    ranges = np.array_split(np.arange(len(states)), MAX_STATES // 2)
    soonest = [r[cost[r].argmin()] for r in ranges for cost in (states.link, states.decoder)]
    return states.take(np.unique(soonest))


def _way(trail: Sequence[States], last: int) -> tuple[int, ...]:
    """Return the width of each item on the way to the last state of that number."""
    found = []
    for states in reversed(trail):
        found.append(int(states.width[last]))
        last = int(states.parent[last])
    return tuple(reversed(found))


def _run(problem: Problem, items: Sequence[Sequence[Layer]], numbers: Sequence[int]) -> LinkPlan:
    """Return the plan that sends each item in the width of that number."""
    states, layers, sent, leaving, kept = States.start(), [], 0.0, 0.0, 0
    backward = max(problem.ready, default=0.0)
    for k, (item, number) in enumerate(zip(items, numbers, strict=True)):
        width = problem.widths[number]
        states = advance(states, problem, item, number, _begins(items, k))
        late = max(0.0, float(states.link[0]) - backward)
        for layer in reversed(item):  # the last one ends with the item
            seconds = problem.transfer(layer, width)
            exposed, error = min(late, seconds), problem.error(layer, width)
            way = (width.bits, exposed, error, width.by_nodes, width.rank_of(layer))
            layers.append(LayerBits(layer.name, layer.bucket, layer.elements, *way))
            late = max(0.0, late - seconds)
            sent += problem.bytes_sent(layer, width)
            leaving += problem.traffic(width)[1] * width.bytes_of(layer)
            kept += width.bytes_kept(layer)
        layers[len(layers) - len(item) :] = reversed(layers[len(layers) - len(item) :])
    parts = {
        (-1 if problem.once >> number & 1 else item[0].bucket, number)
        for item, number in zip(items, numbers, strict=True)
    }
    sent += sum(problem.headers(problem.widths[number]) for _, number in parts)
    links = problem.links
    return LinkPlan(
        problem.ranks,
        links.between.bytes_per_second,
        links.between.latency,
        problem.budget,
        float(states.error[0]),
        problem.ready,
        float(end_of(states, problem)[0]),
        round(sent),
        tuple(layers),
        node=links.node,
        inside=links.inside,
        bytes_between=round(leaving),
        bytes_kept=kept,
    )
