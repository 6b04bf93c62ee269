"""Choose in how many bits FSDP2 modules gather their parameters over a link.

A module takes the width whose gather ends soonest: encode the shard, send it to all other ranks, decode all shards. No
part is assumed to overlap with computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fxprec.errors import PlanError
from fxprec.runtime.aps.groups import communication_device
from fxprec.runtime.aps.link_plan import GatheredBits, LinkPlan
from fxprec.runtime.aps.link_planner import CLOSE
from fxprec.runtime.aps.link_probe import ELEMENTS, usual
from fxprec.runtime.aps.predict import Link
from fxprec.runtime.aps.shards import Shards
from fxprec.runtime.aps.wire import Wire, wire_of

EIGHT_BITS = "int8/128:bf16"
"""Format of 8-bit gathers. It loses 3.6e-5 of normal weights' squared norm, mxfp8_e4m3 8.5e-4 in as many bytes."""


@dataclass
class Gathers:
    """The FSDP2 modules of a model, and the widths to gather them in."""

    modules: Sequence[Shards]
    ranks: int

    def __post_init__(self) -> None:
        self._codings: dict[int, Wire | None] = {32: None, 16: wire_of("bf16"), 8: wire_of(EIGHT_BITS)}
        self._costs: dict[int, tuple[float, float]] = {}
        self._own_bits = [32] * len(self.modules)

    def coding(self, plan: LinkPlan | None, index: int, dtype: torch.dtype) -> Wire | None:
        """Return the wire by which a module that computes in `dtype` gathers parameters; None is unchanged."""
        self._own_bits[index] = own = 8 * dtype.itemsize
        rows = () if plan is None else plan.gathered
        bits = next((row.bits for row in rows if row.name == self.modules[index].name), own)
        return None if bits >= own else self._codings[bits]

    def check(self, plan: LinkPlan) -> None:
        """Raise `PlanError` if a plan gathers modules that this model does not have."""
        sizes = {module.name: sum(module.sizes) for module in self.modules}
        for row in plan.gathered:
            if sizes.get(row.name) != row.elements or row.bits not in self._codings:
                raise PlanError(
                    f"link plan gathers {row.name!r:.60}, {row.elements} elements a rank, in {row.bits} bits; this "
                    "model has no such module, or no such bits; plan again by leaving plan= out"
                )

    def chosen(self, link: Link, group: dist.ProcessGroup) -> tuple[tuple[GatheredBits, ...], int]:
        """Return each module's bits, and the bytes that a rank sends to gather all once; equal on all ranks."""
        if not self._costs:
            self._costs = {bits: _cost(coding, group) for bits, coding in self._codings.items()}
        rows, sent = [], 0
        for module, own in zip(self.modules, self._own_bits, strict=True):
            seconds = {bits: self._seconds(module, own, bits, link) for bits in self._codings if bits <= own}
            bits = max(bits for bits, s in seconds.items() if s <= CLOSE * min(seconds.values()))
            rows.append(GatheredBits(module.name, sum(module.sizes), bits))
            sent += (self.ranks - 1) * self._bytes(module, own, bits)
        return tuple(rows), sent

    def _bytes(self, module: Shards, own: int, bits: int) -> int:
        matrices, rest = module.elements
        coding = self._codings[bits] if bits < own else None
        if coding is None:
            return (matrices + rest) * own // 8
        blocks = sum(-(-n // coding.block) for p, n in zip(module.parameters, module.sizes, strict=True) if p.dim() > 1)
        return blocks * coding.code_bytes + rest * own // 8

    def _seconds(self, module: Shards, own: int, bits: int, link: Link) -> float:
        encode, decode = self._costs[bits] if bits < own else (0.0, 0.0)
        coding = sum(module.sizes) * (encode + self.ranks * decode)
        return coding + link.latency + (self.ranks - 1) * self._bytes(module, own, bits) / link.bytes_per_second


def _cost(coding: Wire | None, group: dist.ProcessGroup) -> tuple[float, float]:
    """Return the seconds per element to encode and to decode, on the slowest rank."""
    if coding is None:
        return 0.0, 0.0
    x = torch.linspace(-1, 1, ELEMENTS, dtype=torch.float32, device=communication_device(group))
    codes = coding.encode(x)
    works = [lambda: coding.encode(x), lambda: x.copy_(coding.decode(codes))]
    encode, decode = usual(works, x.device, group)
    return encode / ELEMENTS, decode / ELEMENTS
