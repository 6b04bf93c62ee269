"""Replace grouped matrix products in the graph that Dynamo captured by `fxprec.ir.grouped`, before AOTAutograd traces.

``torch._grouped_mm`` compiles bfloat16 alone. For float32 weights transformers therefore calls an operator of its own
(``transformers::grouped_mm_fallback``), whose backward reads a tensor's numbers on the host and cannot be traced. Both
leave the rows beyond the last group unwritten, and those numbers would reach statistics and 8-bit copies.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from fxprec import compat
from fxprec.ir.grouped import GroupedMm

_NAMES = ("self", "mat_a", "input"), ("mat2", "mat_b", "weight"), ("offs",)


def name_grouped(gm: GraphModule) -> None:
    """Edit ``gm``, and replace checkpointed regions by edited copies. Products with a bias or a dtype stay."""
    for name in list(compat.bodies_traced_in_place(gm.graph)):
        body = compat.copied(getattr(gm, name))
        name_grouped(body)
        setattr(gm, name, body)
    found = [(node, operands) for node in gm.graph.nodes if (operands := _operands(node)) is not None]
    for node, operands in found:
        node.target, node.args, node.kwargs = GroupedMm.target, operands, {}
    if found:
        gm.recompile()


def _operands(node: Node) -> tuple[Any, ...] | None:
    """Return both operands and the offsets of a grouped product; None for any other node."""
    if node.op != "call_function" or not compat.is_grouped_mm(node.target) or len(node.args) > len(_NAMES):
        return None
    given = [
        *node.args,
        *(next((node.kwargs.get(n) for n in ns if n in node.kwargs), None) for ns in _NAMES[len(node.args) :]),
    ]
    rest = {k: v for k, v in node.kwargs.items() if not any(k in ns for ns in _NAMES)}
    if any(v is not None for v in rest.values()) or not all(isinstance(v, Node) for v in given):
        return None
    return tuple(given)
