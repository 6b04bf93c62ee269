"""Trace a function over tensors as a graph of pointwise ATen nodes, for the printers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

Kind: TypeAlias = Literal["float", "int", "float_scalar", "int_scalar"]
"""A float32 or int32 tensor, or a scalar that all elements share."""


@dataclass(frozen=True)
class Traced:
    """A graph of pointwise nodes, with the names of its inputs and outputs."""

    graph: Graph
    inputs: tuple[str, ...]
    outputs: Mapping[str, Node]


Results: TypeAlias = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]


def trace(function: Callable[..., Results], inputs: Mapping[str, Kind]) -> Traced:
    """Trace ``function(*inputs)``, which returns its results by name, or one or several results without names."""
    names: list[str] = []

    def run(*values: Tensor) -> list[Tensor]:
        found = function(*values)
        if not isinstance(found, Mapping):
            found = {f"v{i}": x for i, x in enumerate(found if isinstance(found, tuple) else (found,))}
        names[:] = found
        return list(found.values())

    examples = [_example(kind) for kind in inputs.values()]
    with torch.no_grad():
        graph = make_fx(run, tracing_mode="fake")(*examples).graph
    drop_aliases(graph)
    graph.eliminate_dead_code()
    (returned,) = graph.output_node().args
    assert isinstance(returned, Sequence)
    return Traced(graph, tuple(inputs), {n: v for n, v in zip(names, returned, strict=True) if isinstance(v, Node)})


def drop_aliases(graph: Graph) -> None:
    """Remove nodes that only alias a tensor: torch 2.14 traces one after every ``view`` as another dtype."""
    for target in _ALIASES:
        for node in graph.find_nodes(op="call_function", target=target):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


_ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def _example(kind: Kind) -> Tensor:
    dtype = torch.float32 if kind.startswith("float") else torch.int32
    return torch.ones(() if kind.endswith("scalar") else 2, dtype=dtype, device="cpu")
