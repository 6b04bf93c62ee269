"""Pass 6: make the symbolic ops of a partitioned graph real."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import GraphModule

from fxprec.passes.lowering.cpu import call_kernels
from fxprec.passes.lowering.expand import expand
from fxprec.passes.lowering.stats import append_outputs, watch


def lower(
    gm: GraphModule, lowering: str, device_type: str, *, watched: Collection[int], scaled: frozenset[int]
) -> tuple[int, ...]:
    """Lower one partitioned graph in place; return the sites whose statistics were appended to its outputs, in order.

    They come as one vector, or as one a site.

    ``eager`` leaves the symbolic ops to their reference implementations; a CPU gets kernel calls; everything else
    ATen ops that Inductor fuses. ``scaled`` are the sites whose scale exponent may differ from 0.
    """
    if lowering != "eager" and device_type == "cpu":
        sites, stats = call_kernels(gm, watched)
        if sites:
            append_outputs(gm.graph, stats)  # as they are: gathering them in the graph costs a C++ kernel each
        gm.graph.eliminate_dead_code()
    else:
        sites = watch(gm, watched)
        if lowering != "eager":
            expand(gm, scaled)
    gm.recompile()
    return sites
