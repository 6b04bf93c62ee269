"""Cut the joint graph into halves as the passes decided.

The partition runs once torch's own joint passes are over. All decisions are in the graph. Values that backward computes
again have nodes of their own, or are recomputed by the user's checkpoints (`regions`). All other values that backward
reads of forward cross (`cut`).

In storage ``simulate``, which stores nothing, torch's min-cut chooses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxprec import compat
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.crossings import crossings, is_copy_of_parameter, source_of_copy
from fxprec.passes.analysis.replay.kernels import draws
from fxprec.passes.base import Work
from fxprec.passes.casts.upsampled import sum_upsampled
from fxprec.passes.casts.written_inputs import copies_of_inputs, copy_written_inputs


@dataclass(frozen=True)
class Partition:
    """The partition of one joint graph; made when the passes are over, before torch's own."""

    work: Work
    traced: Collection[Node]
    """The nodes of the graph before the passes."""
    asked: Mapping[Node, Any] = field(init=False)
    """The policy of the user's checkpoint for each node, read before torch's passes copy policies to other nodes."""
    copies: Mapping[Node, Node] = field(init=False)
    """The model's own copies of inputs and buffers, with what each copies: torch's passes take such copies out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "asked", regions.policies(self.work.joint.graph))
        object.__setattr__(self, "copies", copies_of_inputs(self.work.joint))

    def __call__(self, gm: GraphModule, inputs: Sequence[object], **options: Any) -> compat.Halves:
        """Return both halves."""
        regions.restore(self.asked)
        left = set(gm.graph.nodes)
        gone = [source for copy, source in self.copies.items() if copy not in left]
        if not self.work.is_cut:
            compat.annotate_budget(gm.graph, self.traced)
            for copy in self._copies_again():
                regions.mark(copy, CheckpointPolicy.MUST_RECOMPUTE)
            return as_torch_does(gm, inputs, gone, **options)
        tidy(gm, gone)
        drawn = {node for node in gm.graph.nodes if regions.runs_again(node) and draws(node)}
        return compat.cut(gm, crossings(self.work.joint), drawn, num_fwd_outputs=options["num_fwd_outputs"])

    def _copies_again(self) -> list[Node]:
        """Return the copies of parameters that cost nothing to make again, where that is asked for."""
        joint, budget = self.work.joint, self.work.memory_budget
        copies = (n for n in joint.forward_nodes() if is_copy_of_parameter(n, joint))
        return [n for n in copies if budget < 1 or regions.is_made_again(source_of_copy(n))]


def as_torch_does(gm: GraphModule, inputs: Sequence[object], copied: Collection[Node], **options: Any) -> compat.Halves:
    """Return both halves of a graph as torch's min-cut chooses; ``copied``: inputs that backward reads a copy of."""
    for kept in tidy(gm, copied):
        regions.mark(kept, CheckpointPolicy.MUST_SAVE)
    return compat.min_cut(gm, inputs, **options)


def tidy(gm: GraphModule, copied: Collection[Node]) -> list[Node]:
    """Do what torch's own passes would undo; return what has to be saved for it."""
    kept = copy_written_inputs(gm.graph, copied)
    sum_upsampled(gm.graph)
    compat.keep_random_numbers(gm.graph, [node for node in gm.graph.nodes if draws(node)])
    return kept
