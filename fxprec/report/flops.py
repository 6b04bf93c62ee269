"""What a GEMM computes and reads, from the shapes of the traced graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import dim_hint, factors_of, numel_hint, value


@dataclass(frozen=True, slots=True)
class GemmCost:
    """Cost of one forward GEMM."""

    flops: int | None
    """Two per multiply-add; None for an operator nobody gave a formula."""
    operands: tuple[tuple[int, int], ...]
    """(position of the node in the drawing, elements read)."""
    result: int
    """Elements written."""


def cost_of(node: Node, index: Mapping[Node, int]) -> GemmCost:
    """Return the cost of a GEMM node; its operands are looked up in ``index``, casts and views followed back."""
    operands = []
    for factor in factors_of(node):
        val = value(factor)
        if val is not None:
            operands.append((index[_stored(factor, index)], numel_hint(val)))
    results = [n for n in (node, *node.users) if value(n) is not None]
    result = value(results[0]) if results else None
    return GemmCost(_flops(node, result), tuple(operands), 0 if result is None else numel_hint(result))


def _stored(node: Node, index: Mapping[Node, int]) -> Node:
    """Follow casts and views back to the node that made the value."""
    while (node.target in ops.VIEWS or node not in index) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _flops(node: Node, result: torch.Tensor | None) -> int | None:
    if node.target in ops.ATTENTION:
        return _attention_flops(node)
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None or result is None:
        return None
    args = torch.fx.node.map_aggregate(node.args, _sized)
    try:
        return int(formula(*args, **node.kwargs, out_val=_sized(result)))
    except (TypeError, ValueError, AssertionError, RuntimeError):
        return None


def _sized(argument: object) -> Any:
    """Put a tensor of the traced sizes, without storage, in the place of a node or a fake tensor."""
    val = value(argument) if isinstance(argument, Node) else argument
    return torch.empty([dim_hint(s) for s in val.shape], device="meta") if isinstance(val, torch.Tensor) else val


def _attention_flops(node: Node) -> int | None:
    """Q K^T and its product with V: ``(batch, heads, length, width)`` each; a causal mask is not counted off."""
    values = [value(a) for a in node.args[:3] if isinstance(a, Node)]
    shapes = [[dim_hint(s) for s in v.shape] for v in values if v is not None and v.dim() == 4]
    if len(shapes) != 3:
        return None
    (batch, heads, rows, width), (_, _, columns, _), (*_, out) = shapes
    return 2 * batch * heads * rows * columns * (width + out)
