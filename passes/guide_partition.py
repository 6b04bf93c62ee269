"""Tell AOTAutograd's min-cut what to save: the stored copy, and only it (ALGORITHMS 3, TORCH_NOTES).

An opaque ``dequantize`` could not be recomputed, so the partitioner would save its wide result. Marking it
MUST_RECOMPUTE and ``quantize`` MUST_SAVE makes the stored copy the only way across; cheap pointwise nodes that read
stored copies are recomputed too, or a fused temporary would be saved wide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from fxprec import symbolic
from fxprec.passes.base import Work
from fxprec.passes.joint import is_backward, value
from fxprec.passes.values import is_float_tensor
from fxprec.symbolic_gemms import TRANSPOSED

_AC_GRAPH_ID = 0


@dataclass(frozen=True)
class GuidePartition:
    """Mark which forward nodes are saved and which are recomputed."""

    name: str = "guide-partition"

    def apply(self, work: Work) -> None:
        if work.config.storage_ == "simulate" or not work.joint.tangents:
            return
        for node in work.joint.graph.nodes:
            if node.op != "call_function" or is_backward(node) or "recompute" in node.meta:
                continue
            if node.target in (symbolic.QUANTIZE, TRANSPOSED):
                _mark(node, CheckpointPolicy.MUST_SAVE)
            elif node.target is symbolic.DEQUANTIZE or _is_cheap(node):
                _mark(node, CheckpointPolicy.MUST_RECOMPUTE)


def _mark(node: Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = _AC_GRAPH_ID


def _is_cheap(node: Node) -> bool:
    """Say whether a forward node is pointwise on tensors of its own size: free to repeat next to its reader.

    One that narrows is not: repeating it would keep its wide input.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return False
    val = value(node)
    if val is None or not is_float_tensor(node) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    return any(_numel(arg) == _numel(node) and _width(arg) <= _width(node) for arg in node.all_input_nodes)


def _width(node: Node) -> int:
    val = value(node)
    return 0 if val is None else val.dtype.itemsize


def _numel(node: Node) -> object:
    val = value(node)
    return None if val is None else val.numel()
