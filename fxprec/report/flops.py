"""Count the operations of a GEMM and the elements it reads and writes, from the shapes of the traced graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import factors_of, numel_hint, value
from fxprec.passes.analysis.replay.kernels import flops_of


@dataclass(frozen=True, slots=True)
class GemmCost:
    """Cost of one forward GEMM."""

    flops: int
    """Operations, two per multiply-add."""
    operands: tuple[tuple[int, int], ...]
    """For each operand, the position of its node in the drawing and the elements read."""
    result: int
    """Elements written."""


def cost_of(node: Node, index: Mapping[Node, int]) -> GemmCost:
    """Return the cost of a GEMM node. Its operands are looked up in ``index``, behind casts and views."""
    operands = []
    for factor in factors_of(node):
        val = value(factor)
        if val is not None:
            operands.append((index[_stored(factor, index)], numel_hint(val)))
    results = [n for n in (node, *node.users) if value(n) is not None]
    result = value(results[0]) if results else None
    return GemmCost(int(flops_of(node)), tuple(operands), 0 if result is None else numel_hint(result))


def _stored(node: Node, index: Mapping[Node, int]) -> Node:
    """Follow casts and views back to the node that made the value."""
    while (node.target in ops.VIEWS or node not in index) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
