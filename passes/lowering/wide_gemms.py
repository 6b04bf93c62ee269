"""Compute 16-bit GEMMs in float32, block by block, on a CPU that has no instructions for them."""

from __future__ import annotations

from torch.fx import Graph

from fxprec.config.processor import Processor
from fxprec.kernels.wide_gemms import WIDE
from fxprec.passes.analysis.wide_gemms import is_widened


def widen_gemms(graph: Graph, processor: Processor) -> None:
    """Replace GEMMs whose operands' dtype the processor cannot multiply."""
    for node in graph.nodes:
        if is_widened(node, processor):
            node.target = WIDE[node.target]
