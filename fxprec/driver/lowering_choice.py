"""``lowering="auto"`` on a GPU: each half of a graph is lowered both ways, what is estimated to take less time is kept.

The numbers are the same, bit for bit where the kernels are exact (docs/triton.md); the estimate is a function of the
graph and the device's figures, so every process chooses alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch.fx import GraphModule

from fxprec import compat
from fxprec.driver.capture import copied
from fxprec.passes.lowering.lowered import Lowered
from fxprec.plan.rows import HalfLowering, LoweringChoice, LoweringEstimate, Moved

if TYPE_CHECKING:
    from fxprec.driver.fallback import Lower
    from fxprec.passes.analysis.gemm_costs import Costs
    from fxprec.passes.analysis.traffic.estimate import Traffic

Way = Literal["inductor", "triton"]
_ON_CPU = "a CPU runs Inductor's loops and fxprec's C++ kernels; generated Triton kernels are for GPUs"
_LESS = "the less time for launches and bytes outside GEMMs, by the estimate"


class LoweringChooser:
    """Chooses for the halves of one captured graph, on its device."""

    def __init__(self, device: torch.device, asked: str = "auto") -> None:
        self.device, self.asked = device, asked
        self.halves: dict[str, HalfLowering] = {}
        self.failed: str | None = None
        """Why a half could not be estimated."""

    def why_inductor(self) -> str | None:
        """Say why there is no choice, or None where there is one."""
        return self.failed or (_ON_CPU if self.device.type == "cpu" else compat.no_triton(self.device))

    def lower(self, gm: GraphModule, lower: Lower, without: frozenset[str], half: str) -> tuple[GraphModule, Lowered]:
        """Lower copies of ``gm`` both ways, and return the one that takes less."""
        from fxprec.passes.analysis import gemm_costs  # a start from the cache lowers nothing

        gpu = gemm_costs.gpu_of(self.device)
        assert gpu is not None
        ways = {way: self._lowered(gm, lower, way, without) for way in _WAYS}
        self.halves[half] = chosen = _cheaper(
            {way: found for way, (_, _, found) in ways.items()}, gemm_costs.costs_of(gpu)
        )
        graph, lowered, _ = ways[chosen.chosen]
        return graph, lowered

    def _lowered(
        self, gm: GraphModule, lower: Lower, way: Way, without: frozenset[str]
    ) -> tuple[GraphModule, Lowered, Traffic]:
        from fxprec.passes.analysis.traffic.estimate import traffic_of

        twin = copied(gm)
        lowered = lower(twin, way, without)
        return twin, lowered, traffic_of(twin.graph)

    def for_plan(self) -> LoweringChoice | None:
        """Return what the plan says of the halves lowered so far; None before the first, where there is a choice."""
        if not self.halves:
            why = self.why_inductor()
            return None if why is None else LoweringChoice(asked=self.asked, chosen="inductor", why=why)
        chosen = {half.chosen for half in self.halves.values()}
        name = chosen.pop() if len(chosen) == 1 else "mixed"
        return LoweringChoice(
            asked=self.asked, chosen=name, why=self.failed or _LESS, estimate=LoweringEstimate(**self.halves)
        )


_WAYS: tuple[Way, ...] = ("inductor", "triton")


def _cheaper(found: Mapping[Way, Traffic], costs: Costs) -> HalfLowering:
    moved = {
        way: Moved(launches=traffic.launches, bytes=traffic.bytes, seconds=traffic.seconds(costs))
        for way, traffic in found.items()
    }
    chosen: Way = "triton" if moved["triton"].seconds < moved["inductor"].seconds else "inductor"
    return HalfLowering(chosen=chosen, inductor=moved["inductor"], triton=moved["triton"])
