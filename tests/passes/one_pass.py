"""One pass of the pipeline over a small model's joint graph, as the backend traces it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from helpers import eager_backend
from torch.fx import Graph, Node

from fxprec.passes import pipeline
from fxprec.passes.analysis.joint import is_backward
from fxprec.passes.base import Work


class Enough(Exception):
    """Ends a compilation."""


@dataclass
class Ran:
    """A graph before a pass, and what the pass made of it."""

    before: Graph
    work: Work

    @property
    def graph(self) -> Graph:
        return self.work.joint.graph

    def nodes(self, target: object) -> list[Node]:
        return self.graph.find_nodes(op="call_function", target=target)

    def halves(self, target: object) -> tuple[int, int]:
        """How many calls of ``target`` the forward and the backward half have."""
        in_backward = Counter(is_backward(n) for n in self.nodes(target))
        return in_backward[False], in_backward[True]

    def is_unchanged(self) -> bool:
        return str(self.before) == str(self.graph)


def run_pass(
    name: str,
    model: Callable[..., Any],
    *args: torch.Tensor,
    prepare: Callable[[Work], None] = lambda work: None,
    **options: Any,
) -> Ran:
    """Trace ``model``, run the passes up to the one called ``name``, ``prepare`` its `Work`, and run it."""
    found: list[Ran] = []
    failed: list[Exception] = []
    run = pipeline.run

    def run_one(work: Work, passes: Any, *_: Any) -> None:
        at = [step.name for step in passes].index(name)
        run(work, passes[:at])
        prepare(work)
        before = Graph()
        before.output(before.graph_copy(work.joint.graph, {}))
        try:
            passes[at].apply(work)
        except Exception as error:
            failed.append(error)
        work.joint.graph.lint()
        work.joint.graph.eliminate_dead_code()
        after = Graph()
        after.output(after.graph_copy(work.joint.graph, {}))
        found.append(Ran(before, work))
        raise Enough

    torch._dynamo.reset()
    backend = eager_backend(**{"recipe": "fp8", "low_ratio": 1.0, "promote_above": None, **options})
    with mock.patch.object(pipeline, "run", run_one):
        try:
            torch.compile(model, backend=backend, fullgraph=True)(*args)
        except Exception:
            if not found:
                raise
    if failed:
        raise failed[0]
    return found[0]
