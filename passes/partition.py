"""Split the joint graph into a forward graph and a backward graph as the passes decided.

The partition runs after torch's own joint-graph passes. The graph already holds all decisions. A recomputed value has a
backward node of its own, or belongs to a region that the user's checkpoints recompute (`regions`). Every other forward
value that backward reads is saved (`compat.cut`).

In storage ``simulate``, which stores no low copies, torch's min-cut chooses the saved values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxprec import compat
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.replay.kernels import draws
from fxprec.passes.analysis.saved_values import is_copy_of_parameter, saved_values, source_of_copy
from fxprec.passes.base import Work
from fxprec.passes.casts.upsampled import sum_upsampled
from fxprec.passes.casts.written_inputs import copies_of_inputs, copy_written_inputs


@dataclass(frozen=True)
class Partitioner:
    """The partitioner of one joint graph, built after fxprec's passes and before torch's own passes."""

    work: Work
    traced: Collection[Node]
    """The nodes that the graph had before the passes."""
    policies_before: Mapping[Node, Any] = field(init=False)
    """The checkpoint policy of each node, read before torch's passes copy policies to other nodes."""
    copies: Mapping[Node, Node] = field(init=False)
    """The model's own clones of inputs and buffers, mapped to their sources; torch's passes remove such clones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "policies_before", regions.policies(self.work.joint.graph))
        object.__setattr__(self, "copies", copies_of_inputs(self.work.joint))

    def __call__(self, gm: GraphModule, inputs: Sequence[object], **options: Any) -> compat.Halves:
        """Return the forward and the backward graph."""
        regions.restore(self.policies_before)
        left = set(gm.graph.nodes)
        gone = [source for copy, source in self.copies.items() if copy not in left]
        if not self.work.has_crossings:
            compat.annotate_budget(gm.graph, self.traced)
            for copy in self._recomputed_copies():
                regions.mark(copy, CheckpointPolicy.MUST_RECOMPUTE)
            return min_cut_halves(gm, inputs, gone, **options)
        prepare(gm, gone)
        drawn = {node for node in gm.graph.nodes if regions.backward_recomputes(node) and draws(node)}
        return compat.cut(gm, saved_values(self.work.joint), drawn, num_fwd_outputs=options["num_fwd_outputs"])

    def _recomputed_copies(self) -> list[Node]:
        """Return the stored copies of parameters that backward recomputes from the parameter itself.

        Under an ``activation_memory_budget`` these are all copies, else the copies that only checkpointed regions read.
        """
        joint, budget = self.work.joint, self.work.memory_budget
        copies = (n for n in joint.forward_nodes() if is_copy_of_parameter(n, joint))
        return [n for n in copies if budget < 1 or regions.is_read_by_regions_only(source_of_copy(n))]


def min_cut_halves(
    gm: GraphModule, inputs: Sequence[object], copied: Collection[Node], **options: Any
) -> compat.Halves:
    """Return both halves as torch's min-cut partitions a graph; backward reads a copy of each input in ``copied``."""
    for kept in prepare(gm, copied):
        regions.mark(kept, CheckpointPolicy.MUST_SAVE)
    return compat.min_cut(gm, inputs, **options)


def prepare(gm: GraphModule, copied: Collection[Node]) -> list[Node]:
    """Prepare a graph for the partition: copy overwritten inputs, sum upsamplings' gradients, save random numbers.

    Torch's own passes would undo this. Return the nodes that must be saved.
    """
    kept = copy_written_inputs(gm.graph, copied)
    sum_upsampled(gm.graph)
    compat.keep_random_numbers(gm.graph, [node for node in gm.graph.nodes if draws(node)])
    return kept
