"""Convert a value to a dtype once: the copy that is kept for backward is the one that forward's GEMM multiplies."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

_CONVERT = torch.ops.prims.convert_element_type.default


def share_conversions(graph: Graph) -> None:
    """Rewrite a graph without symbolic ops."""
    made: dict[tuple[object, ...], Node] = {}
    for node in graph.find_nodes(op="call_function", target=_CONVERT):
        first = made.setdefault(node.args, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
