"""Find attention's logits in a graph: the input of its softmax before a mask or a bias is added."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxprec.ir.operators import Trait, having
from fxprec.ir.symbolic import DEQUANTIZE, KEEP_NONFINITE, QUANTIZE
from fxprec.kernels.wide_gemms import WIDE
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.coded_gemms import BATCHED
from fxprec.passes.analysis.joint import is_backward, is_view_or_cast, tensor_of
from fxprec.passes.analysis.operators import module_of, source_of
from fxprec.plan.lines import place

aten = torch.ops.aten


def with_wide(operators: Collection[object]) -> frozenset[object]:
    """Return the operators, and those that compute them in float32 on a CPU without the instructions."""
    return frozenset({*operators, *(WIDE[operator] for operator in operators if operator in WIDE)})


_ATTENTION = with_wide(ops.ATTENTION)
_SOFTMAX = frozenset(name for name in map(str, having(Trait.SOFTMAX)) if "log" not in name)
_MASKS, _SCALINGS = having(Trait.MASKS), having(Trait.SCALES)
_ROUNDINGS = frozenset({QUANTIZE, DEQUANTIZE, KEEP_NONFINITE})
_PRODUCTS = with_wide(BATCHED)
"""Batched products. A product with a parameter is not batched: it computes a router's or classifier's logits."""


@dataclass(frozen=True)
class Attention:
    """One attention in a graph."""

    node: Node
    """The fused attention operator, or the logits that the model computes itself."""
    module: str
    source: str

    @property
    def name(self) -> str:
        """Return ``module, source`` for a message."""
        return place(self.module, self.source) or self.node.name

    def largest(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Tensor:
        """Return the largest magnitude among the logits, a scalar, from the node's arguments and its result."""
        if self.node.target in _ATTENTION:
            return _largest_product(self.node, args, kwargs)
        return _largest(result)


def attentions(nodes: Iterator[Node]) -> Iterator[Attention]:
    """Yield the attentions among ``nodes``, in order."""
    for node in nodes:
        if node.op != "call_function" or is_backward(node):
            continue
        found = node if node.target in _ATTENTION else _logits(node)
        if found is not None:
            yield Attention(found, module_of(node), source_of(node))


def _logits(node: Node) -> Node | None:
    """Return the logits of a softmax whose first node is ``node``; None if no product of matrices computed them."""
    is_softmax = _is_softmax(node.target)
    starts_one = node.target is aten.amax.default and _is_softmax(node.meta.get("original_aten"))
    if not is_softmax and not starts_one:
        return None
    logits = node.all_input_nodes[0]
    while logits.target in _MASKS or _shows(logits):
        logits = _masked(logits)
    return logits if _is_product(logits) else None


def _is_softmax(operator: object) -> bool:
    return str(operator).removesuffix(".default") in _SOFTMAX


def _masked(node: Node) -> Node:
    """Return the source of a view, or the operand of a mask or bias that a product of matrices computed."""
    made = [operand for operand in node.all_input_nodes if _is_product(operand)]
    return made[0] if made else node.all_input_nodes[0]


def _is_product(node: Node) -> bool:
    """Return whether a node is a product of matrices, seen through scalings, masks and views."""
    while node.target in _SCALINGS | _MASKS or _shows(node):
        if not node.all_input_nodes:
            return False
        node = max(node.all_input_nodes, key=lambda operand: tensor_of(operand).numel())
    return node.target in _PRODUCTS


def _shows(node: Node) -> bool:
    return is_view_or_cast(node) or node.target in _ROUNDINGS


def _largest(logits: Tensor) -> Tensor:
    """Return the largest magnitude; elements that a mask set to -inf do not count."""
    return torch.where(logits == -torch.inf, 0.0, logits.detach().float().abs()).amax()


def _largest_product(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Multiply queries and keys again, one head at a time: attention's kernels keep no logits."""
    given = _named(node, args, kwargs)
    query, key, mask = given["query"].detach(), given["key"].detach(), given.get("attn_mask")
    mask = given.get("attn_bias") if mask is None else mask
    scale = given.get("scale") or query.shape[-1] ** -0.5
    heads = query.shape[1]
    keys = key.repeat_interleave(heads // key.shape[1], 1) if key.shape[1] != heads else key
    hidden = _hidden(mask, query, keys) if mask is not None else None
    later = _later(query, keys) if given.get("is_causal") else None
    found = []
    for head in range(heads):
        logits = query[:, head].float() @ keys[:, head].float().transpose(-1, -2) * scale
        if later is not None:
            logits = logits.masked_fill(later, 0.0)
        if hidden is not None:
            logits = logits.masked_fill(hidden[:, head], 0.0)
        found.append(logits.abs().amax())
    return torch.stack(found).amax()


def _named(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _later(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).triu(1)


def _hidden(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the elements that a mask hides, in the logits' shape: models write -inf or their dtype's least number."""
    out = mask.logical_not() if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
    return out.expand(query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])
