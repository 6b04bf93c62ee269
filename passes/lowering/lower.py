"""Lower the symbolic operators of a partitioned graph, by the steps for its device and its lowering."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Graph, GraphModule, Node

from fxprec import compat
from fxprec.ir.symbolic import InMemory, Quantize
from fxprec.kernels.coded_gemms import GemmKernel
from fxprec.kernels.counts import GATHERED
from fxprec.passes.analysis.joint import JointGraph
from fxprec.passes.lowering.bits import lower_bits
from fxprec.passes.lowering.blocks import BlockCall, lower_blocks
from fxprec.passes.lowering.clamps import compare_to_clamp
from fxprec.passes.lowering.conversions import share_conversions, show_bytes_in_memory, widen_products
from fxprec.passes.lowering.cpu import call_kernels
from fxprec.passes.lowering.expand import expand
from fxprec.passes.lowering.gemms import lower_gemms
from fxprec.passes.lowering.in_loops import casts_in_loops
from fxprec.passes.lowering.inline import inlined_casts
from fxprec.passes.lowering.layout import share_channels_last, show_shapes_alike
from fxprec.passes.lowering.lowered import CodedResult, Generated, Incoming, Lowered
from fxprec.passes.lowering.pieces import cast_in_pieces, narrow_in_pieces
from fxprec.passes.lowering.rows import WatchedRows
from fxprec.passes.lowering.scaled_mm import multiply_blocks
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
    multiplies_blocks: bool = False,
) -> Lowered:
    """Lower one partitioned graph in place and append its statistics.

    ``eager`` leaves the symbolic operators to their reference implementations. ``triton`` generates kernels, which
    ``calls`` inserts into the graph. A CPU gets kernel calls where statistics need them. Everything else becomes ATen
    operators that Inductor fuses. ``without`` names kernels that do not work and must not be used. ``contiguous`` are
    the positions, among the results, of gradients whose parameters are contiguous. ``multiplies_blocks``: the device's
    tensor cores multiply operands in blocks.
    """
    incoming = _incoming(gm.graph, rows.scaled - rows.copied)
    counted, histograms = count(gm, rows.counted)
    counters = Counters(rows.watched, rows.measured, histograms)
    half = _Half(gm, lowering, device_type, rows, calls, without, contiguous, counters, histograms)
    decoded = multiply_blocks(gm.graph) if multiplies_blocks and lowering != "eager" else ()
    for step in _STEPS[_runner(lowering, device_type)]:
        step(half)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    blocks = {call.kernel for node in gm.graph.nodes if (call := BlockCall.of(node)) is not None}
    names = (*(kernel.name for kernel in half.generated.kernels), *sorted(blocks))
    return Lowered((*counters.rows, *half.found), counted, half.coded, half.generated, names, incoming, decoded)


def _incoming(graph: Graph, scaled: Container[int]) -> Incoming | None:
    inputs = graph.find_nodes(op="placeholder")
    gradients = tuple(i for i, node in enumerate(inputs) if JointGraph.is_tangent(node))
    tables = (cast.table for _, cast in Quantize.among(Quantize.nodes(graph)) if cast.row in scaled)
    table = next(tables, None) if gradients else None
    return None if table is None else Incoming(inputs.index(table), gradients)


@dataclass
class _Half:
    """The forward or backward half of a training step while it is lowered."""

    gm: GraphModule
    lowering: str
    device_type: str
    rows: WatchedRows
    calls: KernelCalls
    without: Collection[str]
    contiguous: Collection[int]
    counters: Counters
    histograms: list[Node]
    found: tuple[int, ...] = ()
    """Watched rows that no kernel counts for. The nodes in ``counts`` count for them, in the same order."""
    counts: list[Node] = field(default_factory=list)
    unexpanded: frozenset[object] = frozenset()
    """Operators and nodes that are not expanded."""
    coded: tuple[CodedResult, ...] = ()
    generated: Generated = field(default_factory=Generated)

    @property
    def graph(self) -> Graph:
        return self.gm.graph

    def statistics(self) -> list[Node]:
        return [*self.counters.gathered(self.graph), *self.counts, *self.histograms]


_Runner = Literal["reference", "interpreter", "loops", "gpu", "gpu, generated"]


def _runner(lowering: str, device_type: str) -> _Runner:
    if lowering == "eager":
        return "reference"
    if device_type == "cuda":
        return "gpu, generated" if lowering == "triton" else "gpu"
    return "interpreter" if lowering == "triton" else "loops"


def _lower_blocks(half: _Half) -> None:
    compat.lies_in_memory(InMemory.target)
    lower_blocks(half.gm, half.lowering, half.device_type, half.calls, half.without)


def _lower_gemms(half: _Half) -> None:
    lower_gemms(half.gm, half.device_type, half.rows.scaled, half.counters, half.without)


def _generate(half: _Half) -> None:
    half.generated = call_generated(
        half.gm,
        half.calls,
        watched=half.counters.left,
        scaled=half.rows.scaled,
        without=half.without,
        splits_loops=half.device_type != "cuda",
    )
    half.counters.add_first(half.generated.watched, half.generated.counters)


def _cast_in_loops(half: _Half) -> None:
    """Leave casts to Inductor's loops where they can run there, and call kernels for the rest."""
    inlined = inlined_casts(half.graph, half.counters.left, half.rows)
    half.coded, watched = inlined.counted, set(half.counters.left) - set(inlined.rows)
    half.found, half.counts = call_kernels(half.gm, watched, inlined.nodes)
    half.unexpanded = casts_in_loops(half.graph, inlined.nodes, half.rows.scaled)
    append_outputs(half.graph, half.statistics())  # a cat costs one more C++ kernel


def _cast_where_read(half: _Half) -> None:
    cast_where_read(half.graph)


def _watch(half: _Half) -> None:
    half.found, half.counts = watch(half.gm, half.counters.left)


def _add_up(half: _Half) -> None:
    if GemmKernel("totals").name in half.without:
        return
    half.unexpanded = frozenset({GATHERED})
    pieces = cast_in_pieces(half.graph, half.counts)
    order, half.counts = add_up(half.graph, half.counts, half.rows, pieces)
    half.found = tuple(half.found[i] for i in order)


def _append(half: _Half) -> None:
    append_gathered(half.graph, half.statistics())


def _expand(half: _Half) -> None:
    lower_bits(half.graph)
    expand(half.gm, half.rows.scaled, half.rows.measured, half.unexpanded)


def _shape_for_gpu(half: _Half) -> None:
    """Rewrite nodes for which Inductor would generate a worse kernel into forms for which it generates a good one."""
    narrow_in_pieces(half.graph)
    widen_products(half.gm)
    show_bytes_in_memory(half.gm)
    if compat.MAXIMUM_KEEPS_NAN:
        compare_to_clamp(half.graph)
    share_conversions(half.graph)


def _lay_out_for_cpu(half: _Half) -> None:
    if half.rows.inlines:
        share_conversions(half.graph)
    half.graph.eliminate_dead_code()
    lay_out_weights(half.graph, half.contiguous)
    share_channels_last(half.graph)


def _show_shapes(half: _Half) -> None:
    show_shapes_alike(half.graph)


_Steps = tuple[Callable[[_Half], None], ...]
_COMPILED: _Steps = (_lower_blocks, _lower_gemms)
_ON_GPU: _Steps = (_cast_where_read, _watch, _add_up, _append, _expand, _shape_for_gpu)
_STEPS: dict[_Runner, _Steps] = {
    "reference": (_watch, _append),
    # On a CPU Triton runs only in its interpreter, beside the reference.
    "interpreter": (*_COMPILED, _generate, _watch, _append, _show_shapes),
    "loops": (*_COMPILED, _cast_in_loops, _expand, _lay_out_for_cpu, _show_shapes),
    "gpu": (*_COMPILED, *_ON_GPU),
    "gpu, generated": (*_COMPILED, _generate, *_ON_GPU),
}
