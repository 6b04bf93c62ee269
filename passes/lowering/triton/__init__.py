"""Lowering ``triton``: regions that round, pack or unpack become generated Triton kernels.

`regions` finds them, `printer` prints their source, `launch` inserts calls into the graph. Inductor keeps column
reductions (the gradients of a norm's weight, batch norm's statistics), data movement, and regions that neither encode
nor decode.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import GraphModule, Node

from fxprec.ir.symbolic import Dequantize, Quantize, Rescale
from fxprec.passes.lowering.lowered import Generated
from fxprec.passes.lowering.triton.kernel import Unprintable
from fxprec.passes.lowering.triton.launch import KernelCalls, Launches
from fxprec.passes.lowering.triton.printer import Tables, print_kernel
from fxprec.passes.lowering.triton.regions import find_regions, in_order
from fxprec.passes.lowering.triton.shapes_in_graph import SizeNodes
from fxprec.passes.lowering.triton.split_loops import without_split_loops


def call_generated(
    gm: GraphModule,
    calls: KernelCalls,
    *,
    watched: Collection[int],
    scaled: Collection[int],
    without: Collection[str] = (),
    splits_loops: bool = True,
) -> Generated:
    """Replace the regions of ``gm`` by calls of generated kernels, in place.

    ``without`` names kernels that must not be used. If not ``splits_loops``, Inductor keeps regions whose kernels would
    split what it fuses. Symbolic operators outside of the kernels stay in the graph.
    """
    graph = gm.graph
    sizes = SizeNodes(graph)
    for node in graph.find_nodes(op="placeholder"):
        sizes.learn(node)
    launches = Launches(graph, _table(gm), calls, sizes)
    left: list[tuple[str, str]] = []
    found = find_regions(graph)
    for region in in_order(graph, found if splits_loops else without_split_loops(graph, found)):
        rows = [row for row in watched if row not in launches.watched]
        try:
            kernel = print_kernel(region, Tables(scaled, rows))
            if kernel.outputs and kernel.name not in without:
                launches.add(kernel)
        except Unprintable as why:
            left.append((region.nodes[0].name, str(why)))
    made = tuple(kernel for kernel, _ in launches.made)
    return Generated(made, tuple(launches.watched), launches.finish(), tuple(left))


def _table(gm: GraphModule) -> Node | None:
    """Return the scale table, an argument of every symbolic operator but ``keep_nonfinite``; None if there is none."""
    for operator in (Quantize, Dequantize, Rescale):
        for node in operator.nodes(gm.graph):
            return operator.of(node).table
    return None
