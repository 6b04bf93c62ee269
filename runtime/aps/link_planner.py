"""Choose the bits of each layer's gradient so that the step ends soonest and rounding stays within a budget.

Layers are sent in order of readiness. Each layer is encoded, transferred and decoded. Each of these stages takes one
layer at a time, so the step ends with the last decoding. A transfer is free while backward still computes, so bits are
few only if the transfer would end the step later. If ranks share nodes, a layer may also go by nodes: its transfers
inside of the node, before and after, belong to the first and the last stage. Definitions: docs/algorithms.md, "Bits by
link".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxprec.errors import BudgetError
from fxprec.runtime.aps.link_plan import LayerBits, LinkPlan
from fxprec.runtime.aps.link_problem import Layer, Problem, Width

MAX_STATES = 128
"""Most partial choices that are kept after each layer; 4 widths of 128 layers then take half a second."""
MAX_ITEMS = 128
"""Smaller layers of a bucket share one choice, until about this many choices are left."""
CLOSE = 1.01
"""Plans that end within 1 % of the soonest count as equally soon; of these the plan that rounds least is taken."""
_ROUND_OFF = 1 + 1e-12
NEGLIGIBLE = 1e-3
"""Share of the budget below which errors count as equal; of such plans the one that sends less is taken."""
Floats = NDArray[np.float64]


@dataclass
class States:
    """Partial choices, one entry each: when their stages are free, what they have cost, and how they were reached."""

    encoder: Floats
    link: Floats
    decoder: Floats
    busy: Floats
    """Seconds of encoding, decoding and work on exchanges so far."""
    error: Floats
    used: NDArray[np.int64]
    """Widths used so far in the current bucket, one bit each; the first layers of a width pay the latency."""
    parent: NDArray[np.int64]
    width: NDArray[np.int64]

    @classmethod
    def start(cls) -> States:
        """Return the empty choice."""
        zero, none = np.zeros(1), np.zeros(1, dtype=np.int64)
        return cls(zero, zero, zero, zero, zero, none, none, none)

    def __len__(self) -> int:
        return len(self.error)

    def take(self, index: NDArray[np.int64]) -> States:
        """Return the entries at `index`."""
        return States(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    @staticmethod
    def joined(parts: Sequence[States]) -> States:
        """Return the entries of all parts."""
        return States(*(np.concatenate([getattr(p, name) for p in parts]) for name in States.__dataclass_fields__))


def advance(states: States, problem: Problem, items: Sequence[Layer], number: int, begins: bool) -> States:
    """Return the states after these layers of one bucket are sent in width `number`.

    `begins`: the layers are the first of their bucket.
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
    latency = problem.links.between.latency
    link = np.maximum(states.link, encoder) + transfer + first * latency
    arrival = link + (width.messages - 1) * latency  # in these other exchanges of a part, other parts are sent
    work = encode + decode + first * problem.exchanges(width) * problem.links.exchange
    after = (inside + pays) * (problem.transport.passes - 1)  # sums that owners keep are not sent into the node
    return States(
        encoder,
        link,
        np.maximum(states.decoder, arrival) + decode + after,
        states.busy + work,
        states.error + sum(problem.error(layer, width) for layer in items),
        used | 1 << number,
        np.arange(len(states)),
        np.full(len(states), number),
    )


def end_of(states: States, problem: Problem) -> Floats:
    """Return when the step of each state ends: with the last decoding, but not before backward ends."""
    return np.maximum(states.decoder, max(problem.ready, default=0.0) + problem.shares_cores * states.busy)


def alike(problem: Problem) -> list[LinkPlan]:
    """Return the plans with one width for all layers that keep the budget."""
    items = _items(problem)
    plans = [_run(problem, items, (n,) * len(items)) for n in range(len(problem.widths))]
    return [plan for plan in plans if plan.error <= problem.budget * _ROUND_OFF]


def choose(problem: Problem) -> LinkPlan:
    """Return the plan that ends soonest within the budget. Raises `BudgetError` if no plan keeps the budget.

    A dynamic program over layers drops partial choices that are nowhere better than another, and keeps at most
    `MAX_STATES` of the rest. The result is never worse than a plan of one width for all that keeps the budget.
    """
    items = _items(problem)
    least_left = np.cumsum([min(_error(problem, i, w) for w in problem.widths) for i in reversed(items)])[::-1]
    if items and least_left[0] > problem.budget:
        raise BudgetError(
            f"error_budget={problem.budget:.3g} cannot be met: the widest of "
            f"{list(dict.fromkeys(width.bits for width in problem.widths))} bits "
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


def _ranks(problem: Problem, ends: Floats, errors: Floats, soonest: float) -> list[float]:
    """Return the numbers to minimise: the error of plans that end about as soon as `soonest`, infinity for others."""
    close = ends <= soonest * CLOSE
    return [float(x) for x in np.where(close, np.maximum(errors, NEGLIGIBLE * problem.budget), np.inf)]


def _begins(items: Sequence[Sequence[Layer]], k: int) -> bool:
    """Return whether an item is the first of its bucket."""
    return k == 0 or items[k - 1][0].bucket != items[k][0].bucket


def _items(problem: Problem) -> list[list[Layer]]:
    """Return groups of layers that get one width: small neighbours in a bucket, or whole buckets if those must."""
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
    """Return the states that no other equals or beats in every cost; if too many, the soonest of each error range."""
    names = ("encoder", "busy", "decoder", "link", "error")
    states = states.take(np.lexsort([getattr(states, name) for name in names]))
    beaten = (states.used[:, None] & states.used) == states.used  # the first has paid every latency of the second
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
    """Return the width of each item on the path to the state at index `last` after the last item."""
    found = []
    for states in reversed(trail):
        found.append(int(states.width[last]))
        last = int(states.parent[last])
    return tuple(reversed(found))


def _run(problem: Problem, items: Sequence[Sequence[Layer]], numbers: Sequence[int]) -> LinkPlan:
    """Return the plan that sends each item in the width with its number."""
    states, layers, sent, leaving, kept = States.start(), [], 0.0, 0.0, 0
    backward = max(problem.ready, default=0.0)
    for k, (item, number) in enumerate(zip(items, numbers, strict=True)):
        width = problem.widths[number]
        states = advance(states, problem, item, number, _begins(items, k))
        late = max(0.0, float(states.link[0]) - backward)
        for layer in reversed(item):  # the last layer ends with the item
            seconds = problem.transfer(layer, width)
            exposed, error = min(late, seconds), problem.error(layer, width)
            way = (width.bits, exposed, error, width.by_nodes, width.low_rank)
            layers.append(LayerBits(layer.name, layer.bucket, layer.elements, *way))
            late = max(0.0, late - seconds)
            sent += problem.bytes_sent(layer, width)
            leaving += problem.traffic(width)[1] * width.bytes_of(layer)
            kept += problem.bytes_kept(layer, width)
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
