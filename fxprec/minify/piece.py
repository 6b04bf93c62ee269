"""A graph on its own: Dynamo's graph with a recipe for each of its inputs, and the module made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from fxprec.driver.capture import Captured
from fxprec.errors import ConfigError, first_line
from fxprec.testing.case import Case


@dataclass(frozen=True)
class Input:
    """A recipe for one input of a graph: made from its shape and a seed, never from stored values."""

    kind: str
    """"param", "buffer" or "input"."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    mean: float = 0.0
    std: float = 1.0
    low: int = 0
    high: int = 1
    """Bounds of integers, both included."""
    requires_grad: bool = False

    @classmethod
    def like(cls, value: Tensor, kind: str) -> Input:
        """Describe ``value`` by its moments, or integers by their bounds."""
        shape = tuple(value.shape)
        if value.is_floating_point():
            wide = value.detach().double()
            usable = wide[wide.isfinite()]
            mean = float(usable.mean()) if usable.numel() else 0.0
            std = float(usable.std()) if usable.numel() > 1 else 0.0
            return cls(kind, shape, value.dtype, _short(mean), _short(std), requires_grad=value.requires_grad)
        if value.dtype.is_complex or not value.numel():
            return cls(kind, shape, value.dtype)
        return cls(kind, shape, value.dtype, low=int(value.min()), high=int(value.max()))

    def made(self, seed: int) -> Tensor:
        """Return the tensor; a failure's script makes it by the same two lines."""
        generator = torch.Generator().manual_seed(seed)
        if self.dtype.is_floating_point:
            return (
                torch.randn(self.shape, generator=generator, dtype=torch.float32, device="cpu") * self.std + self.mean
            ).to(self.dtype)
        return torch.randint(self.low, self.high + 1, self.shape, generator=generator, device="cpu").to(self.dtype)


@dataclass(frozen=True)
class Piece:
    """A graph whose placeholders are made by the recipes in ``inputs``, by name."""

    graph: Graph
    inputs: Mapping[str, Input]
    values: Mapping[str, Input]
    """Recipes for the values of the whole graph's nodes; an input made by one replaces a node that is cut out."""

    @property
    def operators(self) -> list[Node]:
        """Return the nodes that compute, without inputs, constants and output."""
        return [n for n in self.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]

    def case(self, seed: int = 0) -> Case:
        """Return the module with its inputs."""
        module, called_with = self.module(seed)
        return Case(module, called_with, seed=seed)

    def module(self, seed: int) -> tuple[GraphModule, tuple[Tensor, ...]]:
        """Build the module: parameters and buffers belong to it, other placeholders are its arguments."""
        root, called_with = nn.Module(), []
        graph = Graph()
        kept: dict[Node, Node] = {}
        for i, node in enumerate(self.graph.find_nodes(op="placeholder")):
            spec = self.inputs[node.name]
            value = spec.made(seed + i)
            if spec.kind == "input":
                kept[node] = graph.placeholder(node.name)
                called_with.append(value.requires_grad_(spec.requires_grad))
        for i, node in enumerate(self.graph.find_nodes(op="placeholder")):
            spec = self.inputs[node.name]
            if spec.kind != "input":
                _put(root, node.name, spec, spec.made(seed + i))
                kept[node] = graph.get_attr(node.name)
        result = graph.graph_copy(self.graph, kept)
        graph.output(result)
        return GraphModule(root, graph, "Repro"), tuple(called_with)


def _put(root: nn.Module, name: str, spec: Input, value: Tensor) -> None:
    if spec.kind == "param" and value.is_floating_point():
        root.register_parameter(name, nn.Parameter(value, requires_grad=spec.requires_grad))
    else:
        root.register_buffer(name, value)


def capture(case: Case) -> Piece:
    """Return the single graph that Dynamo captures of a case. Raises `ConfigError` if there are several, or none."""
    taken: list[tuple[Captured, tuple[object, ...]]] = []

    def backend(gm: GraphModule, examples: list[object]) -> object:
        captured = Captured.take(gm, examples)

        def run(*args: object) -> object:
            taken.append((captured, args))
            return gm(*args)

        return run

    torch.compiler.reset()
    model = case.fresh()
    try:
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*case.inputs)
    except Exception as error:
        raise ConfigError(
            f"{case.name} cannot be captured as one graph: {first_line(error)}; reduce a module of it instead"
        ) from None
    if not taken:
        raise ConfigError(f"{case.name} computes nothing that Dynamo can capture; there is nothing to reduce")
    return _piece(*taken[0])


def _piece(captured: Captured, args: tuple[Any, ...]) -> Piece:
    graph = captured.gm.graph
    if graph.find_nodes(op="get_attr") or graph.find_nodes(op="call_module"):
        raise ConfigError("the graph holds sub-graphs (checkpointing, a loop); reduce a module without them")
    placeholders = graph.find_nodes(op="placeholder")
    if not all(isinstance(arg, Tensor) for arg in args):
        raise ConfigError("the graph has an input that is not a tensor; make the model's sizes constant")
    kinds = [known.kind if known.kind in ("param", "buffer") else "input" for known in captured.inputs]
    inputs = {n.name: Input.like(a, kind) for n, a, kind in zip(placeholders, args, kinds, strict=False)}
    recorder = _Recorder(captured.gm)
    recorder.run(*(a.clone() for a in args))
    return Piece(graph, inputs, recorder.values)


class _Recorder(Interpreter):
    """Makes a recipe for every node's value."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[str, Input] = {}

    def run_node(self, n: Node) -> object:
        value = super().run_node(n)
        if isinstance(value, Tensor) and not value.dtype.is_complex:
            self.values[n.name] = Input.like(value, "input")
        return value


def _short(number: float) -> float:
    return float(f"{number:.3g}")
