"""Tell AOTAutograd's min-cut what to save: the stored copy, and only it.

An opaque ``dequantize`` could not be recomputed, so the partitioner would save its wide result. Marking it
MUST_RECOMPUTE and ``quantize`` MUST_SAVE makes the stored copy the only way across; cheap pointwise nodes that read
stored copies are recomputed too, or a fused temporary would be saved wide.

Where the user recomputes (`regions`), a stored copy is recomputed with the tensor it copies, but at the region's
boundary, which is saved as its stored copy. Under an ``activation_memory_budget`` no copy must be saved: the
partitioner chooses among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxprec import compat
from fxprec.ir import symbolic
from fxprec.ir.symbolic_blocks import DEQUANTIZE_BLOCKS, QUANTIZE_BLOCKS, TENSOR_SCALE
from fxprec.ir.symbolic_gemms import TRANSPOSED
from fxprec.ir.symbolic_host import WAIT_OFFLOAD
from fxprec.passes.analysis import ops, regions
from fxprec.passes.analysis.joint import JointGraph, has_tag, input_at, is_backward, set_results, tensor_of, value
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.analysis.values import is_differentiable, is_float_tensor
from fxprec.passes.base import Work
from fxprec.passes.casts.sites import emit, emit_call

_COPY_INTO = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class GuidePartition:
    """Mark which forward nodes are saved and which are recomputed."""

    name: str = "guide-partition"
    stores_copies: bool = True
    """Whether there are stored copies, of which the graph is to save nothing else. Without them the partitioner is told
    only which copies of parameters to make again."""

    def apply(self, work: Work) -> None:
        if not work.joint.tangents:
            return
        # Decided before any mark is set: the marks of a region are those that the user's checkpointing left.
        copies = {n: _copy_of_parameter(n, work, self.stores_copies) for n in _forward(work.joint)}
        marks = {n: mark for n, mark in copies.items() if mark is not None}
        if self.stores_copies:
            marks |= {
                n: mark for n in _forward(work.joint) if (mark := _stored(n, work)) is not None and n not in marks
            }
            _add_repeated(marks, work)
        for node, policy in marks.items():
            regions.mark(node, policy)
        if self.stores_copies:
            _store_in_forward(work.joint, [n for n, policy in marks.items() if policy in _SAVED])


_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def _store_in_forward(joint: JointGraph, copies: list[Node]) -> None:
    """Let a result of forward depend on the copies: what no result needs, AOTAutograd computes in backward.

    A differentiable one: an effect token must come out of forward as it is.
    """
    copies = [node for node in copies if any(is_backward(user) for user in regions.readers_of(node, _BETWEEN))]
    results = list(joint.results)
    for i, x in enumerate(results[: joint.num_forward_outputs]):
        if copies and isinstance(x, Node) and x.op == "call_function" and is_differentiable(x):
            with joint.graph.inserting_before(joint.output):
                results[i] = emit_call(joint.graph, symbolic.Storing(x, copies), x, val=x.meta["val"])
            set_results(joint.graph, results)
            return


def forget_order(forward: Graph) -> None:
    """Take out of a partitioned graph what told the partition to store in forward."""
    for node, storing in symbolic.Storing.among(symbolic.Storing.nodes(forward)):
        node.replace_all_uses_with(storing.x)
        forward.erase_node(node)
        for copy in storing.copies:
            _erase_unread(forward, copy)


def copy_written_inputs(joint: Graph) -> None:
    """Let backward compute again from a copy of an input that forward writes into, not from what it then holds.

    AOTAutograd's partition repeats what is cheap, and takes such an input for one that stays as it was (torch 2.13),
    whether it is written in the graph or behind it. For after torch's own passes, which take copies out.
    """
    for write in joint.find_nodes(op="call_function", target=_COPY_INTO):
        written, new = input_at(write, 0), input_at(write, 1)
        if written.op == "placeholder" and not is_backward(new):
            _copy_for_backward(joint, written, write)
    for written in compat.inputs_written_behind(joint):
        _copy_for_backward(joint, written, joint.output_node())


def _copy_for_backward(joint: Graph, written: Node, write: Node) -> None:
    """Have all but ``write`` read a copy of an input, where backward wants it."""
    if written in _wanted_by_backward(joint):
        with joint.inserting_before(next(n for n in joint.nodes if n.op != "placeholder")):
            kept = emit(joint, torch.ops.aten.clone.default, (written,), written)
        regions.mark(kept, CheckpointPolicy.MUST_SAVE)
        for user in [user for user in written.users if user not in (write, kept)]:
            user.replace_input_with(written, kept)


def _wanted_by_backward(joint: Graph) -> set[Node]:
    """Return what backward reads, and what forward computes that from."""
    wanted: set[Node] = set()
    for node in reversed(joint.nodes):
        if any(is_backward(user) or user in wanted for user in node.users):
            wanted.add(node)
    return wanted


def _erase_unread(graph: Graph, node: Node) -> None:
    """Take out a copy that the partition, under a memory budget, did not keep, and what was computed for it alone."""
    if node.users or node.op != "call_function" or node.is_impure():
        return
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        _erase_unread(graph, source)


def _forward(joint: JointGraph) -> list[Node]:
    return [n for n in joint.graph.nodes if n.op == "call_function" and not is_backward(n)]


def _copy_of_parameter(node: Node, work: Work, stores_copies: bool) -> CheckpointPolicy | None:
    """A parameter's copy is made again where it would count: the parameter itself is there anyway.

    A recipe without a low format asks for no memory: a narrower copy is kept, as autocast keeps it.
    """
    source = node
    while source.target in _COPIES:
        source = source.all_input_nodes[0]
    if source is node or source.op != "placeholder" or work.joint.describe(source).kind != "param":
        return None
    if work.memory_budget < 1 or work.fits_peak or regions.is_made_again(source):
        return CheckpointPolicy.MUST_RECOMPUTE
    if not stores_copies:
        return None
    is_narrower = tensor_of(node).dtype.itemsize < tensor_of(source).dtype.itemsize
    keeps = is_narrower and not work.settings.recipe.has_low
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.MUST_RECOMPUTE


def _stored(node: Node, work: Work) -> CheckpointPolicy | None:
    """Return what becomes of a stored copy, and of what is read from it; under a budget the partitioner chooses."""
    if node.target in _DECODES:
        return CheckpointPolicy.MUST_RECOMPUTE
    if node.target is WAIT_OFFLOAD:
        return CheckpointPolicy.MUST_SAVE
    if node.target not in (*_ENCODES, TRANSPOSED):
        return None
    source = _source(node)
    if regions.is_recomputed(source):
        keeps = node.target in _ENCODES and regions.is_boundary(source)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if work.memory_budget == 1 else CheckpointPolicy.PREFER_SAVE


def _source(copy: Node) -> Node:
    """Return what was stored: codes may be turned, and seen in another shape or dtype, on their way to a GEMM."""
    while copy.target not in _ENCODES:
        copy = copy.all_input_nodes[0]
    return copy.all_input_nodes[0]


def _add_repeated(marks: dict[Node, CheckpointPolicy], work: Work) -> None:
    """Repeat what is as wide as a decoded tensor and free, lest it be saved in the place of the copy.

    Under a memory budget only behind a decoded tensor: the mark forces what a node reads to be there for backward.
    So does that of a node which backward does not want, and an input that forward writes into cannot be (torch 2.15).
    """
    decoded = {n for n in marks if n.target in _DECODES}
    wanted = _wanted_by_backward(work.joint.graph)
    for node in _forward(work.joint):
        if node in marks or node not in wanted:
            continue
        behind = any(n in decoded for n in node.all_input_nodes)
        is_cheap = regions.POLICY not in node.meta and _is_cheap(node) and (behind or work.memory_budget == 1)
        if is_cheap or (behind and (node.target in ops.VIEWS or node.target is CONVERT)):
            marks[node] = CheckpointPolicy.MUST_RECOMPUTE
            if behind:
                decoded.add(node)


# What may stand in forward between a stored copy and who reads it in backward: repeated there.
_BETWEEN = regions.CASTS | ops.VIEWS | ops.CASTS
_ENCODES = (symbolic.QUANTIZE, QUANTIZE_BLOCKS, TENSOR_SCALE)
_DECODES = (symbolic.DEQUANTIZE, DEQUANTIZE_BLOCKS)
_COPIES = frozenset({symbolic.QUANTIZE, symbolic.DEQUANTIZE, TRANSPOSED, CONVERT})


def _is_cheap(node: Node) -> bool:
    """Say whether a forward node is pointwise on tensors of its own size: free to repeat next to its reader.

    One that narrows is not: repeating it would keep its wide input.
    """
    if not has_tag(node, torch.Tag.pointwise) or has_tag(node, torch.Tag.nondeterministic_seeded):
        return False
    if not is_float_tensor(node):
        return False
    return any(_numel(arg) == _numel(node) and _width(arg) <= _width(node) for arg in node.all_input_nodes)


def _width(node: Node) -> int:
    val = value(node)
    return 0 if val is None else val.dtype.itemsize


def _numel(node: Node) -> object:
    val = value(node)
    return None if val is None else val.numel()
