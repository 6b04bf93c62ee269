"""Draw the step's seed for casts that round at random."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.sites import emit


def draw_seed(graph: Graph, before: Node) -> Node:
    """Draw the step's seed from torch's generator; all casts share it."""
    drawn = tensor_of(before).new_empty(1, dtype=torch.int32)
    options = {"dtype": torch.int32, "device": drawn.device}
    with graph.inserting_before(before):
        return emit(graph, torch.ops.aten.randint.low, (-(1 << 31), 1 << 31, [1]), before, kwargs=options, val=drawn)
