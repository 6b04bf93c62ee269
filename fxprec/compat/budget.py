"""The partitioner's ``activation_memory_budget``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch._functorch.config
import torch.fx.traceback
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy


def memory_budget(graph: Graph) -> float:
    """Return the ``activation_memory_budget`` a joint graph is partitioned under: 1 saves all that is worth it.

    As the partitioner reads it: the config, an old marker on nodes, the annotation of a region around the graph.
    """
    budget = float(torch._functorch.config.activation_memory_budget)
    marked = (n.meta["memory_budget"] for n in graph.nodes if isinstance(n.meta.get("memory_budget"), float))
    budget = next(marked, budget)
    return next((b for n in graph.nodes if (b := _annotated_budget(n)) is not None), budget)


def keep_random_numbers(graph: Graph, drawn: Sequence[Node]) -> None:
    """Under a memory budget, have what is random saved: recomputed, a dropout would draw another mask (torch 2.13).

    Of a random number that Inductor generates that is its seed. A budget of 0 would save nothing whatever is marked.
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
    """Give nodes that are not ``known`` the annotation of the others: the partitioner wants it on every node."""
    annotated = next((n for n in graph.nodes if _annotated_budget(n) is not None), None)
    if annotated is not None:
        for node in graph.nodes:
            if node not in known and node.op == "call_function":
                node.meta["custom"] = {**annotated.meta["custom"], **node.meta.get("custom", {})}


_annotated_budget: Callable[[Any], float | None] = getattr(
    torch.fx.traceback, "_get_memory_budget_annotation", lambda node: None
)
