"""Random numbers as Inductor's joint-graph passes draw them, by seeds of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

_PRIMS = torch.ops.prims


def is_drawn(node: Node) -> bool:
    """Return whether a node draws uniform random numbers from one of Inductor's seeds."""
    target = getattr(_PRIMS, "inductor_random", None)
    return target is not None and node.target is target.default and str(node.args[2]) == "rand"


def drawn_in_slices(node: Node, size: Sequence[int], count: int) -> list[Node]:
    """Insert ``count`` draws of ``size``, each with a seed of its own, at the graph's insertion point."""
    val: torch.Tensor = node.meta["val"]
    graph = node.graph
    seeds = graph.call_function(_PRIMS.inductor_seeds.default, (count, val.device))
    seeds.meta["val"] = val.new_empty(count, dtype=torch.int64)
    found = []
    for place in range(count):
        seed = graph.call_function(_PRIMS.inductor_lookup_seed.default, (seeds, place))
        seed.meta["val"] = val.new_empty((), dtype=torch.int64)
        drawn = graph.call_function(_PRIMS.inductor_random.default, (list(size), seed, "rand"), dict(node.kwargs))
        drawn.meta["val"] = val.new_empty(size)
        found.append(drawn)
    return found
