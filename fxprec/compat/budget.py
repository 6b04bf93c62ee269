"""Read and mark torch's ``activation_memory_budget``, a setting of its partitioner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
import torch._functorch.config
import torch.fx.traceback
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy


def memory_budget(graph: Graph) -> float:
    """Return the ``activation_memory_budget`` of a joint graph; with 1 the partitioner recomputes only what is cheap.

    The value is read as the partitioner reads it: the config, an old marker on nodes, then a region's annotation.
    """
    budget = float(torch._functorch.config.activation_memory_budget)
    marked = (n.meta["memory_budget"] for n in graph.nodes if isinstance(n.meta.get("memory_budget"), float))
    budget = next(marked, budget)
    return next((b for n in graph.nodes if (b := _annotated_budget(n)) is not None), budget)


def keep_random_numbers(graph: Graph, drawn: Sequence[Node]) -> None:
    """Mark random numbers as saved under a memory budget, as a recomputed dropout draws another mask (torch 2.13).

    For Inductor's own random numbers the seed is saved. A budget of 0 would ignore the marks, so the budget is raised
    to almost 0.
    """
    budget = memory_budget(graph)
    if budget == 1:
        return
    for node in drawn:
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    if budget == 0 and drawn:
        for node in graph.nodes:
            node.meta["memory_budget"] = _NEXT_TO_NOTHING
            if _annotated_budget(node) is not None:
                node.meta["custom"] = {**node.meta["custom"], _BUDGET_KEY: _NEXT_TO_NOTHING}


_NEXT_TO_NOTHING = 1e-9
_BUDGET_KEY = getattr(torch.fx.traceback, "MEMORY_BUDGET_ANNOTATION_KEY", "memory_budget")


def annotate_budget(graph: Graph, known: Collection[Node]) -> None:
    """Copy the budget annotation to nodes that are not ``known``: the partitioner requires it on every node."""
    annotated = next((n for n in graph.nodes if _annotated_budget(n) is not None), None)
    if annotated is not None:
        for node in graph.nodes:
            if node not in known and node.op == "call_function":
                node.meta["custom"] = {**annotated.meta["custom"], **node.meta.get("custom", {})}


_annotated_budget: Callable[[object], float | None] = getattr(
    torch.fx.traceback, "_get_memory_budget_annotation", lambda node: None
)
