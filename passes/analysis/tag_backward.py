"""Tag the backward nodes that torch leaves untagged."""

from __future__ import annotations

from torch.fx import Graph

from fxprec.passes.analysis.joint import JointGraph, is_backward


def tag_backward(graph: Graph) -> None:
    """Tag the untagged nodes of a custom ``torch.autograd.Function``'s backward as backward, in place.

    Dynamo captures such a backward as a graph of its own. AOTAutograd runs that graph node by node, and the metadata of
    its nodes replaces the tag. A node without a tag belongs to backward if it reads a backward node, or if it comes
    after all forward nodes. Its ``seq_nr`` is that of forward's last operator, to which it does not belong.
    """
    tags = [node.meta.get("partitioner_tag") for node in graph.nodes]
    ends = max((i for i, tag in enumerate(tags) if tag == "is_forward"), default=len(tags))
    for i, (node, tag) in enumerate(zip(graph.nodes, tags, strict=True)):
        if node.op != "call_function" or tag is not None or is_backward(node):
            continue
        if i > ends or any(is_backward(x) or JointGraph.is_tangent(x) for x in node.all_input_nodes):
            node.meta["partitioner_tag"] = "is_backward"
            node.meta["autograd_backward"] = True
            node.meta.pop("seq_nr", None)
