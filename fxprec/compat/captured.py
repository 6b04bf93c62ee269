"""Inspect and copy Dynamo's graphs before AOTAutograd traces them: attention, grouped products, inlined submodules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch._functorch.eager_transforms
from torch.fx import Graph, GraphModule, Node

from fxprec.compat.autograd import hand_on_sources

_TRACED_IN_PLACE = (
    "tag_activation_checkpoint",
    "wrap_activation_checkpoint",
    "wrap",
    "wrap_with_set_grad_enabled",
    "wrap_with_autocast",
)
"""Higher-order operators whose body is inlined into the graph around it, unlike those of ``torch.cond`` and scan."""

ATTENTION = (
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


_GROUPED = (torch._grouped_mm, getattr(torch.nn.functional, "grouped_mm", None))


_GRADIENTS = (torch._functorch.eager_transforms._autograd_grad, torch.autograd.grad)


def gradients_within(graph: Graph) -> Iterator[Node]:
    """Yield nodes that compute gradients within the graph, as `torch.func.grad` does: their backward is part of it."""
    return (node for node in graph.nodes if node.op == "call_function" and node.target in _GRADIENTS)


def is_grouped_mm(target: object) -> bool:
    """Return whether a node's target is a grouped matrix product, of torch or of transformers."""
    named = str(target).removesuffix(".default")
    return target in _GROUPED or named in ("aten._grouped_mm", "transformers.grouped_mm_fallback")


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return a grouped matrix product, by torch's kernel."""
    return torch._grouped_mm(a, b, offs=offs)


def bodies_traced_in_place(graph: Graph) -> Iterator[str]:
    """Yield the attribute names of the submodules whose nodes AOTAutograd inlines into ``graph``."""
    found = [getattr(torch.ops.higher_order, name, None) for name in _TRACED_IN_PLACE]
    operators = {operator for operator in found if operator is not None}
    for node in graph.find_nodes(op="get_attr"):
        if any(user.target in operators for user in node.users):
            assert isinstance(node.target, str)
            yield node.target


def copied(gm: GraphModule) -> GraphModule:
    """Return a copy with its own graph, and the same node names, fake values and Dynamo's names of inputs."""
    graph = Graph()
    result = graph.graph_copy(gm.graph, {}, return_output_node=True)
    assert isinstance(result, tuple)
    graph.output(result[0]).meta = dict(result[1].meta)
    found = GraphModule(gm, graph)
    found.meta = dict(gm.meta)
    hand_on_sources(found, gm)
    return found
