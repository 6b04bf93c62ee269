"""The maths of a rule as a graph of ATen nodes, for the printers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec.runtime.optim import maths
from fxprec.runtime.optim.fma import as_one_node
from fxprec.runtime.optim.rule import INTEGERS, Rule


@dataclass(frozen=True)
class Traced:
    """A graph of pointwise nodes and what its inputs and outputs are called."""

    graph: Graph
    inputs: dict[str, str]
    """Kind of each input, in order: "tensor" (float32 (n,)), "scalar" (float32), "integer" (int32) or "index"."""
    outputs: dict[str, Node]
    """The written tensors by name, and the masks ``nonzero`` and ``cancelled`` where they are counted."""


@cache
def trace(rule: Rule) -> Traced:
    """Trace one step of ``rule``."""
    kinds = dict.fromkeys(rule.tensors, "tensor") | dict.fromkeys(rule.scalars, "scalar")
    kinds |= dict.fromkeys(INTEGERS, "integer") | {"index": "index"}
    tensor, integers = (
        torch.ones(2, dtype=torch.float32, device="cpu"),
        torch.arange(2, dtype=torch.int32, device="cpu"),
    )
    examples = {"tensor": tensor, "scalar": tensor[0], "integer": integers[1], "index": integers}
    names: list[str] = []

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        given = dict(zip(kinds, values, strict=True))
        found = maths.step(rule, given, given, given["index"] if rule.stochastic else None)
        written = dict(found.values)
        if found.nonzero is not None and found.cancelled is not None:
            written |= {"nonzero": found.nonzero, "cancelled": found.cancelled}
        names[:] = written
        return list(written.values())

    with as_one_node(), torch.no_grad():
        graph = make_fx(run, tracing_mode="fake")(*(examples[kind].clone() for kind in kinds.values())).graph
    graph.eliminate_dead_code()
    (returned,) = graph.output_node().args
    outputs = dict(zip(names, returned, strict=True))  # type: ignore[arg-type]
    return Traced(graph, kinds, outputs)
