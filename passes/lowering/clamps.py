"""Write ReLUs and clamps as comparisons where Inductor's minimum and maximum are instructions that keep NaN.

Some GPUs compute such an instruction wrongly beside transposed stores of bytes (triton issue 11111). Inductor fuses the
bound of a value with the cast that stores it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Graph

from fxprec.passes.analysis.joint import argument, input_at
from fxprec.passes.lowering.expand import insert
from fxprec.passes.sites import replace_node

aten = torch.ops.aten


def compare_to_clamp(graph: Graph) -> None:
    """Replace each ReLU and one-sided clamp of a lowered graph by a comparison and a ``where``; NaN stays NaN."""
    for operator, compared in _COMPARED.items():
        for node in graph.find_nodes(op="call_function", target=operator):
            bound = () if operator is aten.relu.default else (argument(node, 1),)
            with graph.inserting_before(node):
                clamped = insert(graph, compared, input_at(node, 0), *bound)
            clamped.meta = dict(node.meta)
            replace_node(node, clamped)


def _at_least(x: Tensor, _: object, least: float = 0) -> Tensor:
    return torch.where(x < least, least, x)


def _at_most(x: Tensor, _: object, most: float) -> Tensor:
    return torch.where(x > most, most, x)


_COMPARED: dict[Callable[..., object], Callable[..., Tensor]] = {
    aten.relu.default: _at_least,
    aten.clamp_min.default: _at_least,
    aten.clamp_max.default: _at_most,
}
