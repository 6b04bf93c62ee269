"""Cut the joint graph where the passes decided: what crosses from forward to backward, and what backward repeats.

It runs once torch's own joint passes are over. Where choose-crossings has chosen, the graph says all of it: what
backward repeats is made by nodes of its own, and what they read of forward crosses (`cut`).

Where the user recomputes (`regions`), and in storage ``simulate``, torch's min-cut chooses, and is told of stored
copies: a copy is saved, and what is decoded from it is repeated. An opaque ``dequantize`` could not be repeated, so it
would save the wide result. In a region a stored copy is recomputed with the tensor it copies, but at the region's
boundary, which is saved as its stored copy. Under an ``activation_memory_budget`` beside regions no copy must be saved:
torch's partition chooses among them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxprec import compat
from fxprec.ir.symbolic import DEQUANTIZE, QUANTIZE, TENSOR_SCALE, TRANSPOSED
from fxprec.passes.analysis import ops, regions
from fxprec.passes.analysis.crossings import crossings, is_copy_of_parameter, wanted_by_backward
from fxprec.passes.analysis.joint import has_tag, is_backward, tensor_of, value
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.analysis.peak.kernels import draws
from fxprec.passes.analysis.values import is_float_tensor
from fxprec.passes.base import Work
from fxprec.passes.casts.upsampled import sum_upsampled
from fxprec.passes.casts.written_inputs import copy_written_inputs

SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
Policies = dict[Node, CheckpointPolicy]


@dataclass(frozen=True)
class Partition:
    """The partition of one joint graph; made when the passes are over, before torch's own."""

    work: Work
    traced: Collection[Node]
    """The nodes of the graph before the passes."""
    asked: Mapping[Node, Any] = field(init=False)
    """What the user's checkpointing says of each node: torch's passes give some of it to other nodes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "asked", regions.policies(self.work.joint.graph))

    def __call__(self, gm: GraphModule, inputs: Sequence[object], **options: Any) -> compat.Halves:
        """Return both halves."""
        regions.restore(self.asked)
        kept = tidy(gm)
        if self.work.is_cut:
            return compat.cut(gm, crossings(self.work.joint), num_fwd_outputs=options["num_fwd_outputs"])
        compat.annotate_budget(gm.graph, self.traced)
        policies = told(self.work) | dict.fromkeys(kept, SAVE)
        for node, policy in policies.items():
            regions.mark(node, policy)
        stored = [node for node, policy in policies.items() if policy is not AGAIN and _is_read_in_backward(node)]
        return compat.min_cut(gm, inputs, stored=stored, **options)


def as_torch_does(gm: GraphModule, inputs: Sequence[object], **options: Any) -> compat.Halves:
    """Return both halves of a graph that no pass has rewritten."""
    for kept in tidy(gm):
        regions.mark(kept, SAVE)
    return compat.min_cut(gm, inputs, **options)


def tidy(gm: GraphModule) -> list[Node]:
    """Do what torch's own passes would undo; return what has to be saved for it."""
    kept = copy_written_inputs(gm.graph)
    sum_upsampled(gm.graph)
    compat.keep_random_numbers(gm.graph, [node for node in gm.graph.nodes if draws(node)])
    return kept


def told(work: Work) -> Policies:
    """Return what torch's min-cut is told of forward's nodes, beside what the user's checkpointing says."""
    found, stores_copies = Policies(), not work.settings.is_simulated
    forward = [n for n in work.joint.graph.nodes if n.op == "call_function" and not is_backward(n)]
    for node in forward:
        policy = _of_parameters_copy(node, work, stores_copies)
        if policy is None and stores_copies:
            policy = _of_copy(node, work)
        if policy is not None:
            found[node] = policy
    if stores_copies:
        _add_repeated(found, forward, work)
    return found


def _of_parameters_copy(node: Node, work: Work, stores_copies: bool) -> CheckpointPolicy | None:
    """A parameter's copy is made again where it would count: the parameter itself is there anyway.

    A recipe without a low format asks for no memory: a narrower copy is kept, as autocast keeps it.
    """
    if not is_copy_of_parameter(node, work.joint):
        return None
    source = node
    while source.op != "placeholder":
        source = source.all_input_nodes[0]
    if work.memory_budget < 1 or regions.is_made_again(source):
        return AGAIN
    if not stores_copies:
        return None
    is_narrower = tensor_of(node).dtype.itemsize < tensor_of(source).dtype.itemsize
    keeps = is_narrower and not work.settings.recipe.has_low
    return SAVE if keeps else AGAIN


def _of_copy(node: Node, work: Work) -> CheckpointPolicy | None:
    """Return what becomes of a stored copy, and of what is read from it; under a budget the partitioner chooses."""
    if node.target is DEQUANTIZE:
        return AGAIN
    if node.target not in (*_ENCODES, TRANSPOSED):
        return None
    source = _source(node)
    if regions.is_recomputed(source):
        keeps = node.target in _ENCODES and regions.is_boundary(source)
        return SAVE if keeps else AGAIN
    return SAVE if work.memory_budget == 1 else CheckpointPolicy.PREFER_SAVE


def _source(copy: Node) -> Node:
    """Return what was stored: codes may be turned, and seen in another shape or dtype, on their way to a GEMM."""
    while copy.target not in _ENCODES:
        copy = copy.all_input_nodes[0]
    return copy.all_input_nodes[0]


def _add_repeated(policies: Policies, forward: Sequence[Node], work: Work) -> None:
    """Repeat what is as wide as a decoded tensor and free, lest it be saved in the place of the copy.

    Under a memory budget only behind a decoded tensor: the policy forces what a node reads to be there for backward.
    So does that of a node which backward does not want, and an input that forward writes into cannot be (torch 2.15).
    """
    decoded = {n for n in policies if n.target is DEQUANTIZE}
    wanted = wanted_by_backward(work.joint.graph)
    for node in forward:
        if node in policies or node not in wanted:
            continue
        behind = any(n in decoded for n in node.all_input_nodes)
        is_cheap = regions.POLICY not in node.meta and _is_cheap(node) and (behind or work.memory_budget == 1)
        if is_cheap or (behind and (node.target in ops.VIEWS or node.target is CONVERT)):
            policies[node] = AGAIN
            if behind:
                decoded.add(node)


def _is_read_in_backward(copy: Node) -> bool:
    return any(is_backward(user) for user in regions.readers_of(copy, _BETWEEN))


# What may stand in forward between a stored copy and who reads it in backward: repeated there.
_BETWEEN = regions.CASTS | ops.VIEWS | ops.CASTS
_ENCODES = (QUANTIZE, TENSOR_SCALE)


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
