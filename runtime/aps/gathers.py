"""Choose in how many bits FSDP2 modules gather their parameters over a link.

A module takes the width whose gather ends soonest: encode the shard, send it to all other ranks, decode all shards. No
part is assumed to overlap with computation. If ranks share nodes, each shard enters a node once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from fxprec.errors import PlanError
from fxprec.runtime.aps.groups import communication_device
from fxprec.runtime.aps.link_plan import GatheredBits, LinkPlan
from fxprec.runtime.aps.link_planner import CLOSE
from fxprec.runtime.aps.link_probe import ELEMENTS, usual
from fxprec.runtime.aps.links import Links
from fxprec.runtime.aps.shards import Shards
from fxprec.runtime.aps.wire import Wire, wire_of

EIGHT_BITS = "int8/128:bf16"
"""Format of 8-bit gathers. It loses 3.6e-5 of normal weights' squared norm, mxfp8_e4m3 8.5e-4 in as many bytes."""
FOUR_BITS = "int4/64:bf16"
"""Format of differences. It loses 0.8 % of normal differences' squared norm, which the next difference has again."""


class Way(NamedTuple):
    """How a module's matrices are gathered in codes."""

    wire: Wire
    exact_every: int | None = None
    """Gathers from one that sends matrices as they are to the next; the others send differences. None sends values."""


@dataclass
class Gathers:
    """The FSDP2 modules of a model, and the widths to gather them in; 4 bits, of differences, with `exact_every`."""

    modules: Sequence[Shards]
    ranks: int
    exact_every: int | None = None

    def __post_init__(self) -> None:
        self._ways: dict[int, Way | None] = {32: None, 16: Way(wire_of("bf16")), 8: Way(wire_of(EIGHT_BITS))}
        if self.exact_every is not None:
            self._ways[4] = Way(wire_of(FOUR_BITS), self.exact_every)
        self._costs: dict[int, tuple[float, float]] = {}
        self._own_bits = [32] * len(self.modules)

    def way(self, plan: LinkPlan | None, index: int, dtype: torch.dtype) -> Way | None:
        """Return how a module that computes in `dtype` gathers its matrices; None is unchanged."""
        self._own_bits[index] = own = 8 * dtype.itemsize
        rows = () if plan is None else plan.gathered
        bits = next((row.bits for row in rows if row.name == self.modules[index].name), own)
        return None if bits >= own else self._ways[bits]

    def check(self, plan: LinkPlan) -> None:
        """Raise `PlanError` if a plan gathers modules that this model does not have."""
        sizes = {module.name: sum(module.sizes) for module in self.modules}
        for row in plan.gathered:
            if sizes.get(row.name) != row.elements or row.bits not in self._ways:
                raise PlanError(
                    f"link plan gathers {row.name!r:.60}, {row.elements} elements a rank, in {row.bits} bits; this "
                    "model has no such module, or no such bits; plan again by leaving plan= out"
                )

    def chosen(self, links: Links, group: dist.ProcessGroup) -> tuple[tuple[GatheredBits, ...], int]:
        """Return each module's bits, and the bytes that a rank sends to gather all once; equal on all ranks."""
        if not self._costs:
            self._costs = {bits: _cost(way, group) for bits, way in self._ways.items()}
        rows, sent = [], 0.0
        for module, own in zip(self.modules, self._own_bits, strict=True):
            seconds = {bits: self._seconds(module, own, bits, links) for bits in self._ways if bits <= own}
            bits = max(bits for bits, s in seconds.items() if s <= CLOSE * min(seconds.values()))
            kept = self.ranks * sum(module.sizes) * own // 8 if bits == 4 else 0
            rows.append(GatheredBits(module.name, sum(module.sizes), bits, kept))
            sent += (self.ranks - 1) * self._bytes(module, own, bits)
        return tuple(rows), round(sent)

    def _bytes(self, module: Shards, own: int, bits: int) -> float:
        """Return the bytes of one rank's message, on average over exact and other gathers."""
        matrices, rest = module.elements
        whole = (matrices + rest) * own // 8
        if bits >= own or (way := self._ways[bits]) is None:
            return whole
        block = way.wire.block
        blocks = sum(-(-n // block) for p, n in zip(module.parameters, module.sizes, strict=True) if p.dim() > 1)
        coded = blocks * way.wire.code_bytes + rest * own // 8
        return coded if way.exact_every is None else coded + 1 + (whole - coded) / way.exact_every

    def _seconds(self, module: Shards, own: int, bits: int, links: Links) -> float:
        encode, decode = self._costs[bits] if bits < own else (0.0, 0.0)
        coding = sum(module.sizes) * (encode + self.ranks * decode)
        size, between, inside = self._bytes(module, own, bits), links.between, links.inside
        entering = (self.ranks - links.node) * size  # by nodes; of ranks alike a node is one rank
        seconds = coding + between.latency + entering / between.bytes_per_second
        if inside is not None:
            passed_on = self.ranks * (1 - 1 / links.node) * size
            seconds += inside.latency + passed_on / inside.bytes_per_second
        return seconds


def _cost(way: Way | None, group: dist.ProcessGroup) -> tuple[float, float]:
    """Return the seconds per element to encode and to decode, on the slowest rank."""
    if way is None:
        return 0.0, 0.0
    coding = way.wire
    x = torch.linspace(-1, 1, ELEMENTS, dtype=torch.float32, device=communication_device(group))
    codes = coding.encode(x)
    works = [lambda: coding.encode(x), lambda: x.copy_(coding.decode(codes))]
    encode, decode = usual(works, x.device, group)
    return encode / ELEMENTS, decode / ELEMENTS
