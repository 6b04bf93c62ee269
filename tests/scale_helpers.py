"""Joint graphs before and after the pass carry-scales, run node by node with exponents of the test's choice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from helpers import eager_backend
from torch.fx import Graph, GraphModule, Interpreter, Node

from fxprec.config import Settings
from fxprec.config.recipes import Recipe
from fxprec.passes import carry_scales, pipeline, sites
from fxprec.plan.scales import ScaleGraph
from fxprec.runtime.table import Formats, format_rows, with_scales

IDENTITY = Recipe(name="identity", hi="fp32", lo_forward="fp32", lo_backward="fp32")
"""Rounding to float32 is the identity: whatever changes is the scales' doing."""


class Captured(Exception):
    """Ends a compilation once its joint graph is known."""


@contextmanager
def scaled_identity() -> Iterator[None]:
    """Let gradients in float32 carry scales too, and be cast although it changes nothing."""
    with (
        mock.patch.object(Settings, "rounds_anything", True),
        mock.patch.object(carry_scales, "needs_scale", return_value=True),
        mock.patch.object(sites.SiteBook, "is_identity", return_value=False),
    ):
        yield


@dataclass
class Joint:
    """One joint graph, with casts, before and after carry-scales."""

    plain: Graph
    scaled: Graph
    scales: ScaleGraph
    carried: dict[str, int]  # node name -> variable
    plan: Any
    remarks: list[str]
    root: torch.nn.Module  # owner of constants

    def random_exps(self, seed: int, largest: int = 40) -> list[int]:
        pick = random.Random(seed)
        return [pick.randint(-largest, largest) for _ in self.scales.variables]

    def table(self, exps: list[int]) -> torch.Tensor:
        base = format_rows(Formats(self.plan.sites, self.scales, self.scales.num_rows(len(self.plan.sites))))
        return with_scales(base, self.scales, exps, measure=False)


def joint_of(
    function: Callable[..., Any], *args: Any, recipe: Any = IDENTITY, storage: str = "simulate", **more: Any
) -> Joint:
    """Trace ``function`` as the backend does, up to and with carry-scales.

    Every gradient that a GEMM multiplies is stored: compute-high, which on a CPU would leave none, is left out.
    """
    found: list[Joint] = []
    walks: list[Any] = []
    run_passes = pipeline.run
    walk_init = carry_scales._Walk.__post_init__

    def remember(walk: Any) -> None:
        walk_init(walk)
        walks.append(walk)

    def run(work: Any, *_: Any) -> None:
        passes = [p for p in pipeline.pipeline_for(work.settings) if p.name != "compute-high"]
        names = [p.name for p in passes]
        before = passes[: names.index("carry-scales")]
        run_passes(work, before)
        plain = Graph()
        plain.output(plain.graph_copy(work.joint.graph, {}))
        after = passes[len(before) : names.index("write-plan") + 1]
        for step in after:
            step.apply(work)
        work.joint.graph.eliminate_dead_code()
        work.joint.graph.lint()
        carried = {n.name: v for n, v in walks[-1].carried.items() if n in set(work.joint.graph.nodes)}
        root = work.joint.graph.owning_module
        found.append(Joint(plain, work.joint.graph, work.scales, carried, work.plan, work.remarks, root))
        raise Captured

    torch._dynamo.reset()
    backend = eager_backend(recipe, storage=storage, **{"low_ratio": 0.5, **more})
    with mock.patch.object(pipeline, "run", run), mock.patch.object(carry_scales._Walk, "__post_init__", remember):
        try:
            torch.compile(function, backend=backend, fullgraph=True)(*args)
        except Exception:
            if not found:
                raise
    return found[0]


class Recording(Interpreter):
    """Runs a graph and keeps every node's value; those ``given`` by name are not computed."""

    def __init__(self, graph: Graph, root: torch.nn.Module, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(GraphModule(root, graph))
        self.values: dict[str, Any] = {}
        self.given = given or {}

    def run_node(self, n: Node) -> Any:
        given = self.given.get(n.name)
        self.values[n.name] = super().run_node(n) if given is None else given
        return self.values[n.name]
