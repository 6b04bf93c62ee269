"""Casts to block formats: calls of compiled kernels on a CPU, elsewhere operators that Inductor fuses."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from fxprec.ir.symbolic_blocks import DequantizeBlocks, LoadBlocks, QuantizeBlocks, StoreBlocks


def call_block_kernels(gm: GraphModule) -> None:
    """Replace casts to block formats by calls of the CPU's kernels."""
    for q, cast in QuantizeBlocks.among(QuantizeBlocks.nodes(gm.graph)):
        _replace(gm, q, StoreBlocks.like(cast))
    for x, read in DequantizeBlocks.among(DequantizeBlocks.nodes(gm.graph)):
        _replace(gm, x, LoadBlocks.like(read))


def _replace(gm: GraphModule, node: Node, call: StoreBlocks | LoadBlocks) -> None:
    with gm.graph.inserting_before(node):
        new = call.insert(gm.graph)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
