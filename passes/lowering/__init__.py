"""Pass 6: make the symbolic ops of a partitioned graph real."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import GraphModule

from fxprec.passes.lowering.cpu import call_kernels
from fxprec.passes.lowering.expand import expand
from fxprec.passes.lowering.stats import append_output, watch


def lower(
    gm: GraphModule, lowering: str, device_type: str, *, watched: Collection[int], scaled: frozenset[int]
) -> tuple[int, ...]:
    """Lower one partitioned graph in place and append its statistics; return their sites in order.

    ``eager`` leaves the symbolic ops to their reference implementations; a CPU gets kernel calls; everything else
    ATen ops that Inductor fuses. ``scaled`` are the sites whose scale exponent may differ from 0.
    """
    if lowering != "eager" and device_type == "cpu":
        sites, stats = call_kernels(gm, watched)
        if sites:
            append_output(gm.graph, stats)
        gm.graph.eliminate_dead_code()
    else:
        sites = watch(gm, watched)
        if lowering != "eager":
            expand(gm, scaled)
    gm.recompile()
    return sites
