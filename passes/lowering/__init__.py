"""Pass 6: make the symbolic ops of a partitioned graph real."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from fxprec.ir import symbolic
from fxprec.passes.lowering.cpu import call_kernels
from fxprec.passes.lowering.expand import expand
from fxprec.passes.lowering.gemms import lower_gemms
from fxprec.passes.lowering.nonfinite import keep_nonfinite
from fxprec.passes.lowering.stats import append_gathered, append_outputs, count, watch
from fxprec.passes.lowering.triton import Generated, call_generated
from fxprec.passes.lowering.triton.launch import KernelCalls


@dataclass(frozen=True)
class Lowered:
    """What lowering appended to a graph's outputs, and the kernels it generated."""

    rows: tuple[int, ...]
    """Rows of the statistics, in order. They come as one vector, or as one a row."""
    counted: tuple[int, ...]
    """Rows of the histograms behind them."""
    generated: Generated = field(default_factory=Generated)


def lower(
    gm: GraphModule,
    lowering: str,
    device_type: str,
    *,
    watched: Collection[int],
    scaled: frozenset[int],
    measured: frozenset[int] = frozenset(),
    counted: Collection[int] = (),
    forward: bool = False,
    calls: KernelCalls | None = None,
    without: Collection[str] = (),
) -> Lowered:
    """Lower one partitioned graph in place and append its statistics.

    ``eager`` leaves the symbolic ops to their reference implementations; ``triton`` generates kernels, which ``calls``
    puts into the graph; a CPU gets kernel calls; everything else ATen ops that
    Inductor fuses. ``scaled`` are the rows whose scale exponent may differ from 0, ``measured`` those whose moments
    count, ``counted`` those that get a histogram. In the ``forward`` half inf and NaN are kept where a format has none.
    ``without`` names kernels not to use, since they do not work.
    """
    if forward:
        keep_nonfinite(gm.graph)
    counted_rows, histograms = count(gm, counted)
    generated = Generated()
    if lowering == "triton":
        assert calls is not None
        taken = _gemms_first(gm, device_type, watched, scaled, measured, without, histograms)
        left = [row for row in watched if row not in taken]
        generated = call_generated(gm, calls, watched=left, scaled=scaled, without=without)
        others, stats = watch(gm, [row for row in left if row not in generated.watched])
        rows = (*generated.watched, *taken, *others)
        _gather(gm, [*generated.statistics, *taken.values(), *stats, *histograms])
    elif lowering != "eager" and device_type == "cpu":
        rows, stats = call_kernels(gm, watched)
        append_outputs(gm.graph, [*stats, *histograms])  # gathering them in the graph costs a C++ kernel each
    else:
        rows, stats = watch(gm, watched)
        _gather(gm, [*stats, *histograms])
    if lowering not in ("eager", "triton"):
        lower_gemms(gm, device_type, scaled, measured, without)
    # Triton runs on a CPU in its interpreter only, beside the reference.
    if lowering != "eager" and not (lowering == "triton" and device_type == "cpu"):
        expand(gm, scaled, measured)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return Lowered(rows, counted_rows, generated)


def _gemms_first(
    gm: GraphModule,
    device_type: str,
    watched: Collection[int],
    scaled: frozenset[int],
    measured: frozenset[int],
    without: Collection[str],
    kept: list[Node],
) -> dict[int, Node]:
    """Lower the GEMMs; return the statistics that their kernels take over, by row. The others' nodes go again.

    ``kept`` are nodes that nothing reads yet.
    """
    rows, nodes = watch(gm, watched)
    output = gm.graph.output_node()
    own = output.args
    append_outputs(gm.graph, [*nodes, *kept])  # as an output, a node is seen to be replaced, and is not dead
    lower_gemms(gm, device_type, scaled, measured, without)
    found: tuple[Node, ...] = output.args[0][len(own[0]) :]  # type: ignore[arg-type,index,assignment]
    output.args = (output.args[0][: len(own[0])],)  # type: ignore[arg-type,index]
    counted = found[: len(rows)]
    taken = {row: node for row, node in zip(rows, counted, strict=True) if node.target is not symbolic.SITE_STATS}
    for node in gm.graph.find_nodes(op="call_function", target=symbolic.SITE_STATS):
        gm.graph.erase_node(node)
    return taken


def _gather(gm: GraphModule, vectors: list[Node]) -> None:
    if vectors:
        append_gathered(gm.graph, vectors)
