"""Pass 6: make the symbolic ops of a partitioned graph real."""

from __future__ import annotations

from collections.abc import Collection

from fxprec.passes.lowering.expand import expand
from fxprec.passes.lowering.stats import watch
from torch.fx import GraphModule


def lower(
    gm: GraphModule, lowering: str, *, watched: Collection[int], scaled: frozenset[int]
) -> tuple[int, ...]:
    """Lower one partitioned graph in place and append its statistics; return the sites in their order.

    ``eager`` leaves the symbolic ops to their reference implementations; every other lowering expands them.
    """
    sites = watch(gm, watched)
    if lowering != "eager":
        expand(gm, scaled)
    else:
        gm.recompile()
    return sites
