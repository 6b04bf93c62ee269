"""Regions the user asked to recompute: `torch.utils.checkpoint` and its kin, as autograd marks their forward nodes.

A marked node has a policy, ``meta["recompute"]``, and the number of its region, ``meta["ac_graph_id"]``. A tensor
made in a region is recomputed in backward, unless the policy saves it. The region's boundary is saved: values that a
later region, or the backward of operators behind the region, starts from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxprec.ir.symbolic import DEQUANTIZE, KEEP_NONFINITE, QUANTIZE, TRANSPOSED
from fxprec.passes.analysis.joint import is_backward, is_view, readers

POLICY, REGION = "recompute", "ac_graph_id"
REGION_META = (POLICY, REGION)
CASTS = frozenset({QUANTIZE, DEQUANTIZE, KEEP_NONFINITE, TRANSPOSED})
_COPIES = CASTS | {torch.ops.prims.convert_element_type.default}


def mark(node: Node, policy: CheckpointPolicy) -> None:
    """Set a policy of ours in place of the region's, and without a region: the partitioner's rules are for regions."""
    node.meta.pop(REGION, None)
    node.meta[POLICY] = policy


def policies(graph: Graph) -> dict[Node, Any]:
    """Return the policy of every node, None where it has none."""
    return {node: node.meta.get(POLICY) for node in graph.nodes}


def restore(policies: Mapping[Node, Any]) -> None:
    """Give each node the policy it had, whatever torch's own passes put there.

    Where they take out an operator that changes nothing (``x + 0``), what it read gets its metadata: an input to be
    computed again, which no partition can, or a GEMM that would be computed twice.
    """
    for node, policy in policies.items():
        if policy is None:
            node.meta.pop(POLICY, None)
        else:
            node.meta[POLICY] = policy


def forget(graph: Graph) -> bool:
    """Take away what the user's checkpointing decided; say whether there was any."""
    marked = [node for node in graph.nodes if is_marked(node)]
    for node in marked:
        for key in REGION_META:
            del node.meta[key]
    return bool(marked)


def is_marked(node: Node) -> bool:
    """Say whether the user's checkpointing decided about a forward node, either way."""
    return POLICY in node.meta and REGION in node.meta


def are_in(graph: Graph) -> bool:
    """Say whether anything of a joint graph is to be computed again."""
    return any(is_recomputed(node) for node in graph.nodes)


def is_recomputed(node: Node) -> bool:
    """Say whether a forward node is to be computed again in backward."""
    return must_recompute(node) and REGION in node.meta


def must_recompute(node: Node) -> bool:
    """Say whether the user's checkpoint recomputes a node in backward."""
    return node.meta.get(POLICY) in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def is_boundary(node: Node) -> bool:
    """Say whether a recomputed node's value is where a later region starts, or what is behind its own region reads."""
    region = node.meta[REGION]
    found = list(readers_of(node))
    behind = [u for u in found if not is_backward(u) and u.meta.get(REGION) != region]
    if any(is_recomputed(u) and u.meta[REGION] > region for u in behind):
        return True
    # A backward node belongs to the forward operator of its number.
    numbers = {u.meta.get("seq_nr") for u in behind if not is_recomputed(u)} - {None}
    return any(is_backward(u) and u.meta.get("seq_nr") in numbers for u in found)


def runs_again(node: Node) -> bool:
    """Say whether backward computes a forward node again: it is recomputed, and no boundary, which is saved."""
    return is_recomputed(node) and not is_boundary(node)


def is_saved(node: Node) -> bool:
    """Say whether the user's policy saves a node of a region."""
    return is_marked(node) and node.meta[POLICY] == CheckpointPolicy.MUST_SAVE


def is_start(node: Node) -> bool:
    """Say whether a recomputation starts from a forward value: a boundary, or one that no region recomputes."""
    if is_recomputed(node):
        return is_boundary(node)
    return any(not is_backward(u) and is_recomputed(u) for u in readers_of(node))


def is_made_again(node: Node) -> bool:
    """Say whether a parameter is read in regions only: its stored copy can be made again from the parameter itself."""
    forward = [u for u in readers_of(node, through=_COPIES) if not is_backward(u)]
    return bool(forward) and all(is_marked(u) for u in forward)


def readers_of(node: Node, through: Collection[object] = CASTS) -> Iterable[Node]:
    """Return what reads a value, seen through views and casts of forward."""
    found = readers(node, lambda user: not is_backward(user) and (is_view(user) or user.target in through))
    return dict.fromkeys(reader for _, reader in found if reader.op != "output")
