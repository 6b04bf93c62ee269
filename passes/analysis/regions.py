"""Find the regions that the user's checkpoints recompute (`torch.utils.checkpoint` and its kin).

Autograd marks a region's forward nodes with a policy, ``meta["recompute"]``, and the region's number,
``meta["ac_graph_id"]``. Backward recomputes a tensor of a region, unless the policy saves it. The region's boundary is
saved: values that a later region, or the backward of operators behind the region, starts from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxprec.ir.symbolic import DEQUANTIZE, KEEP_NONFINITE, QUANTIZE, TRANSPOSED
from fxprec.passes.analysis.joint import is_backward, is_view, readers
from fxprec.passes.analysis.ops import CONVERT

POLICY, REGION = "recompute", "ac_graph_id"
REGION_META = (POLICY, REGION)
CASTS = frozenset({QUANTIZE, DEQUANTIZE, KEEP_NONFINITE, TRANSPOSED})
_COPIES = CASTS | {CONVERT}


def mark(node: Node, policy: CheckpointPolicy) -> None:
    """Set a node's policy and remove its region, because the partitioner has rules of its own for regions."""
    node.meta.pop(REGION, None)
    node.meta[POLICY] = policy


def policies(graph: Graph) -> dict[Node, object]:
    """Return the policy of every node, None for a node without a policy."""
    return {node: node.meta.get(POLICY) for node in graph.nodes}


def restore(policies: Mapping[Node, object]) -> None:
    """Give each node its earlier policy back, after torch's own passes changed it.

    When a pass of torch's removes an operator without effect (``x + 0``), it gives the operator's metadata to its
    input. Then a graph input would have to be recomputed, which no partition can do, or a GEMM would be computed twice.
    """
    for node, policy in policies.items():
        if policy is None:
            node.meta.pop(POLICY, None)
        else:
            node.meta[POLICY] = policy


def forget(graph: Graph) -> bool:
    """Remove the marks of the user's checkpointing; return whether there were any."""
    marked = [node for node in graph.nodes if is_marked(node)]
    for node in marked:
        for key in REGION_META:
            del node.meta[key]
    return bool(marked)


def is_marked(node: Node) -> bool:
    """Return whether the user's checkpointing decided to save or to recompute a forward node."""
    return POLICY in node.meta and REGION in node.meta


def is_marked_recompute(node: Node) -> bool:
    """Return whether the user's policy recomputes a node of a region in backward, nodes on the boundary included."""
    return must_recompute(node) and REGION in node.meta


def must_recompute(node: Node) -> bool:
    """Return whether a node's policy is to recompute it in backward."""
    return node.meta.get(POLICY) in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def is_boundary(node: Node) -> bool:
    """Return whether a later region, or the backward of operators behind the region, reads a recomputed node."""
    region = node.meta[REGION]
    found = list(readers_of(node))
    later = [u for u in found if not is_backward(u) and u.meta.get(REGION) != region]
    if any(is_marked_recompute(u) and u.meta[REGION] > region for u in later):
        return True
    # A backward node belongs to the forward operator with the same ``seq_nr``.
    numbers = {u.meta.get("seq_nr") for u in later if not is_marked_recompute(u)} - {None}
    return any(is_backward(u) and u.meta.get("seq_nr") in numbers for u in found)


def backward_recomputes(node: Node) -> bool:
    """Return whether backward recomputes a forward node. A recomputed node on the boundary is saved instead."""
    return is_marked_recompute(node) and not is_boundary(node)


def is_saved(node: Node) -> bool:
    """Return whether the user's policy saves a node of a region."""
    return is_marked(node) and node.meta[POLICY] == CheckpointPolicy.MUST_SAVE


def is_start(node: Node) -> bool:
    """Return whether a recomputation starts from a forward value: a boundary, or a value that no region recomputes."""
    if is_marked_recompute(node):
        return is_boundary(node)
    return any(not is_backward(u) and is_marked_recompute(u) for u in readers_of(node))


def is_read_by_regions_only(node: Node) -> bool:
    """Return whether only regions read a parameter in forward, so that its stored copy can be recomputed from it."""
    forward = [u for u in readers_of(node, through=_COPIES) if not is_backward(u)]
    return bool(forward) and all(is_marked(u) for u in forward)


def readers_of(node: Node, through: Collection[object] = CASTS) -> Iterable[Node]:
    """Return the readers of a value, seen through forward's views and casts."""
    found = readers(node, lambda user: not is_backward(user) and (is_view(user) or user.target in through))
    return dict.fromkeys(reader for _, reader in found if reader.op != "output")
