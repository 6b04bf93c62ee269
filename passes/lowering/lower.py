"""Make the symbolic ops of a partitioned graph real."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import GraphModule

from fxprec import compat
from fxprec.ir.symbolic import InMemory
from fxprec.ir.symbolic_gemms import GATHERED, GemmKernel
from fxprec.passes.lowering.blocks import lower_blocks
from fxprec.passes.lowering.clamps import compare_to_clamp
from fxprec.passes.lowering.conversions import share_conversions, show_bytes_in_memory, widen_products
from fxprec.passes.lowering.cpu import call_kernels
from fxprec.passes.lowering.expand import expand
from fxprec.passes.lowering.gemms import lower_gemms
from fxprec.passes.lowering.in_loops import casts_in_loops
from fxprec.passes.lowering.inline import inlined_casts
from fxprec.passes.lowering.layout import share_channels_last
from fxprec.passes.lowering.lowered import CodedResult, Generated, Lowered
from fxprec.passes.lowering.pieces import cast_in_pieces, narrow_in_pieces
from fxprec.passes.lowering.rows import WatchedRows
from fxprec.passes.lowering.stats import Counters, append_gathered, append_outputs, count, watch
from fxprec.passes.lowering.totals import add_up, cast_where_read
from fxprec.passes.lowering.triton import call_generated
from fxprec.passes.lowering.triton.launch import KernelCalls
from fxprec.passes.lowering.weights import lay_out_weights

_CALLS: KernelCalls = compat.TritonCalls()


def lower(
    gm: GraphModule,
    lowering: str,
    device_type: str,
    rows: WatchedRows,
    *,
    calls: KernelCalls = _CALLS,
    without: Collection[str] = (),
    contiguous: Collection[int] = (),
) -> Lowered:
    """Lower one partitioned graph in place and append its statistics.

    ``eager`` leaves the symbolic ops to their reference implementations; ``triton`` generates kernels, which ``calls``
    puts into the graph; a CPU gets kernel calls where statistics want them; everything else ATen ops that Inductor
    fuses. ``without`` names kernels not to use, since they do not work; ``contiguous`` are the positions among the
    results of gradients whose parameters are contiguous.
    """
    on_gpu = device_type == "cuda" and lowering != "eager"
    adds_up = on_gpu and GemmKernel("totals").name not in without
    counted_rows, histograms = count(gm, rows.counted)
    coded: tuple[CodedResult, ...] = ()
    left = frozenset[object]({GATHERED} if adds_up else ())
    generated, counters = Generated(), Counters(rows.watched, rows.measured, histograms)
    if lowering != "eager":
        compat.lies_in_memory(InMemory.target)
        lower_blocks(gm, lowering, device_type, calls)
        lower_gemms(gm, device_type, rows.scaled, counters, without)
    if lowering == "triton":
        generated = call_generated(
            gm, calls, watched=counters.left, scaled=rows.scaled, without=without, tears=not on_gpu
        )
        counters.add_first(generated.watched, generated.counters)
    in_cpu_loops = lowering not in ("eager", "triton") and device_type == "cpu"
    if in_cpu_loops:
        inlined = inlined_casts(gm.graph, counters.left, rows)
        coded, left = inlined.counted, casts_in_loops(inlined.nodes)
        found, counts = call_kernels(gm, set(counters.left) - set(inlined.rows), inlined.nodes)
        append_outputs(gm.graph, [*counters.gathered(gm.graph), *counts, *histograms])  # a cat costs a C++ kernel each
    else:
        if on_gpu:
            cast_where_read(gm.graph)
        found, counts = watch(gm, counters.left)
        if adds_up:
            order, counts = add_up(gm.graph, counts, rows, cast_in_pieces(gm.graph, counts))
            found = tuple(found[i] for i in order)
        append_gathered(gm.graph, [*counters.gathered(gm.graph), *counts, *histograms])
    # Triton runs on a CPU in its interpreter only, beside the reference.
    if lowering != "eager" and not (lowering == "triton" and device_type == "cpu"):
        expand(gm, rows.scaled, rows.measured, left)
        if device_type == "cuda":
            narrow_in_pieces(gm.graph)
            widen_products(gm)
            show_bytes_in_memory(gm)
            if compat.MAXIMUM_KEEPS_NAN:
                compare_to_clamp(gm.graph)
        if rows.inlines or device_type == "cuda":
            share_conversions(gm.graph)
    gm.graph.eliminate_dead_code()
    if in_cpu_loops:
        lay_out_weights(gm.graph, contiguous)
        share_channels_last(gm.graph)
    gm.recompile()
    return Lowered((*counters.rows, *found), counted_rows, coded, generated)
