"""Pass 6: make the symbolic ops of a partitioned graph real."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import GraphModule

from fxprec.passes.lowering.cpu import call_kernels
from fxprec.passes.lowering.expand import expand
from fxprec.passes.lowering.gemms import lower_gemms
from fxprec.passes.lowering.stats import append_gathered, append_outputs, count, watch


def lower(
    gm: GraphModule,
    lowering: str,
    device_type: str,
    *,
    watched: Collection[int],
    scaled: frozenset[int],
    measured: frozenset[int] = frozenset(),
    counted: Collection[int] = (),
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lower one partitioned graph in place and append its statistics; return the rows they are of, in order.

    They come as one vector, or as one a row.

    ``eager`` leaves the symbolic ops to their reference implementations; a CPU gets kernel calls; everything else
    ATen ops that Inductor fuses. ``scaled`` are the rows whose scale exponent may differ from 0, ``measured`` those
    whose moments count, ``counted`` those that get a histogram: their rows come second.
    """
    counted_rows, histograms = count(gm, counted)
    if lowering != "eager" and device_type == "cpu":
        rows, stats = call_kernels(gm, watched)
        append_outputs(gm.graph, [*stats, *histograms])  # gathering them in the graph costs a C++ kernel each
    else:
        rows, stats = watch(gm, watched)
        if stats:
            append_gathered(gm.graph, [*stats, *histograms])
    if lowering != "eager":
        lower_gemms(gm, device_type, scaled, measured)
        expand(gm, scaled, measured)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return rows, counted_rows
