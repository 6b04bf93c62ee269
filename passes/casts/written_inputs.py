"""Copy each input that is overwritten before backward reads it: backward would read the new value otherwise."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from fxprec import compat
from fxprec.passes.analysis.joint import JointGraph, behind_inputs, input_at, is_backward
from fxprec.passes.sites import emit

_COPY_INTO = torch.ops.aten.copy_.default


def copies_of_inputs(joint: JointGraph) -> dict[Node, Node]:
    """Return the clones that the model makes of its inputs and buffers, mapped to their sources."""
    clones = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    sources = {clone: input_at(clone, 0) for clone in clones if not is_backward(clone)}
    return {
        clone: source
        for clone, source in sources.items()
        if source.op == "placeholder" and joint.describe(source).kind in ("input", "buffer")
    }


def copy_written_inputs(joint: Graph, copied: Collection[Node]) -> list[Node]:
    """Make backward read a copy of each input that is overwritten, and of each in ``copied``; return the copies.

    The model itself clones the inputs in ``copied``, since it may overwrite them after the graph has run. torch's
    passes removed these clones.

    torch's partition recomputes cheap nodes, and takes an overwritten input for unchanged (torch 2.13), whether the
    graph overwrites it or the code behind it. Call this after torch's own passes, which remove copies.
    """
    writes = [
        (input_at(write, 0), write)
        for write in joint.find_nodes(op="call_function", target=_COPY_INTO)
        if input_at(write, 0).op == "placeholder" and not is_backward(input_at(write, 1))
    ]
    behind = dict.fromkeys([*compat.inputs_written_behind(joint), *copied])
    writes += [(written, joint.output_node()) for written in behind]
    wanted = _wanted_by_backward(joint)
    return [_copied(joint, written, write) for written, write in writes if written in wanted]


def _copied(joint: Graph, written: Node, write: Node) -> Node:
    """Make all readers except ``write`` read a copy of an input."""
    with joint.inserting_before(behind_inputs(joint)):
        kept = emit(joint, torch.ops.aten.clone.default, (written,), written)
    for user in [user for user in written.users if user not in (write, kept)]:
        user.replace_input_with(written, kept)
    return kept


def _wanted_by_backward(graph: Graph) -> set[Node]:
    """Return the nodes that backward reads, and the nodes that forward computes these from."""
    wanted = set[Node]()
    for node in reversed(graph.nodes):
        if any(is_backward(user) or user in wanted for user in node.users):
            wanted.add(node)
    return wanted
