"""Find the values that are saved from forward for backward, in a graph that says which nodes backward computes."""

from __future__ import annotations

from torch.fx import Node

from fxprec.ir.calls import reads_copy
from fxprec.ir.symbolic import DEQUANTIZE, QUANTIZE, TRANSPOSED
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.joint import JointGraph, is_backward, value
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.analysis.replay.kernels import Kind, kind_of

_COPIES = frozenset({QUANTIZE, DEQUANTIZE, TRANSPOSED, CONVERT})


def saved_values(joint: JointGraph) -> list[Node]:
    """Return the inputs and forward nodes that cross to backward, in graph order.

    Backward computes its own nodes, and nodes that depend on a decoded copy which forward does not need. Backward also
    repeats some forward nodes: views, decoded copies, copies of parameters, and nodes that the user's checkpoints
    recompute.
    """
    own = _backwards_own(joint)
    found, seen = set[Node](), set[Node]()
    stack = [x for x in joint.results[joint.num_forward_outputs :] if isinstance(x, Node)]
    while stack:
        node = stack.pop()
        if node in seen or joint.is_tangent(node):
            continue
        seen.add(node)
        if node in own or is_repeated(node, joint) or regions.backward_recomputes(node):
            stack += node.all_input_nodes
        elif node.op != "get_attr":  # both halves have the constants
            found.add(node)
    return [node for node in joint.graph.nodes if node in found]


def _backwards_own(joint: JointGraph) -> set[Node]:
    """Return backward's nodes, and nodes from a decoded copy or a tangent that forward does not need."""
    needed, own = needed_by_forward(joint), set[Node]()
    for node in joint.graph.nodes:
        if node.op != "call_function" or (node in needed and not is_backward(node)):
            continue
        reads_own = any(n in own or joint.is_tangent(n) for n in node.all_input_nodes)
        if is_backward(node) or reads_own or reads_copy(node):
            own.add(node)
    return own


def needed_by_forward(joint: JointGraph) -> set[Node]:
    """Return the results of forward and all nodes that they depend on."""
    needed = {x for x in joint.results[: joint.num_forward_outputs] if isinstance(x, Node)}
    for node in reversed(joint.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed


def is_repeated(node: Node, joint: JointGraph) -> bool:
    """Return whether backward repeats a forward node instead of saving its value.

    Such a node is a view, a decoded value, a parameter's copy, or a widened 16-bit value.
    """
    return kind_of(node) is Kind.VIEW or _is_decoded(node) or _is_widened(node) or is_copy_of_parameter(node, joint)


def is_copy_of_parameter(node: Node, joint: JointGraph) -> bool:
    """Return whether a node stores or converts a parameter, or reads such a copy. The parameter is there anyway."""
    source = source_of_copy(node)
    return source is not node and source.op == "placeholder" and joint.describe(source).kind == "param"


def source_of_copy(node: Node) -> Node:
    """Return the value that a node stores, converts or reads back, or the node itself."""
    while node.target in _COPIES:
        node = node.all_input_nodes[0]
    return node


def _is_widened(node: Node) -> bool:
    wide, narrow = value(node), value(node.all_input_nodes[0]) if node.target is CONVERT else None
    return (
        wide is not None
        and narrow is not None
        and narrow.is_floating_point()
        and narrow.dtype.itemsize < wide.dtype.itemsize
    )


def _is_decoded(node: Node) -> bool:
    """Return whether a node is decoded from a copy, seen through views and conversions."""
    while kind_of(node) is Kind.VIEW or node.target is CONVERT:
        node = node.all_input_nodes[0]
    return reads_copy(node)
