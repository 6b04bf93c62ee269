"""A read-only view of AOTAutograd's joint graph: inputs, outputs, forward and backward halves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import sympy
import torch
from torch.fx import Graph, Node

from fxprec.passes import ops

InputKind = Literal["param", "buffer", "input", "table"]


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input of the graph Dynamo captured, in call order."""

    name: str  # the user's name: "layer1.0.conv1.weight", "x"
    kind: InputKind
    module: str  # the owning module's path, "" for inputs


def input_index(node: Node) -> int:
    """Return which captured input a ``primals_*`` placeholder stands for."""
    desc = node.meta.get("desc")
    index = getattr(desc, "idx", None)
    if isinstance(index, int):
        return index
    return int(node.name.rpartition("_")[2]) - 1


def is_backward(node: Node) -> bool:
    """Say whether autograd made this node."""
    return node.meta.get("partitioner_tag") == "is_backward" or bool(node.meta.get("autograd_backward"))


def value(node: Node) -> torch.Tensor | None:
    """Return the node's fake tensor, or None where the node holds something else."""
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def is_float(node: Node) -> bool:
    """Say whether the node holds one floating-point tensor."""
    val = value(node)
    return val is not None and val.dtype.is_floating_point


def numel_expr(val: torch.Tensor) -> sympy.Expr:
    """Return the number of elements as a sympy expression in the dynamic dimensions."""
    expr: sympy.Expr = sympy.Integer(1)
    for size in val.shape:
        expr = expr * (size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size)))
    return expr


def dim_hint(size: int | torch.SymInt) -> int:
    """Return a size as it was traced."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.hint is not None else int(size)
    return int(size)


def numel_hint(val: torch.Tensor) -> int:
    """Return the number of elements at the traced sizes."""
    count = 1
    for size in val.shape:
        count *= dim_hint(size)
    return count


def shape_text(val: torch.Tensor) -> str:
    """Return ``"s0 x 64 x 32"``; a scalar is ``"1"``."""
    return " x ".join(str(size) for size in val.shape) or "1"


@dataclass(frozen=True)
class JointGraph:
    """The joint graph with its borders named. In an inference graph there is no backward half."""

    graph: Graph
    inputs: Sequence[GraphInput]

    @cached_property
    def placeholders(self) -> tuple[Node, ...]:
        return tuple(n for n in self.graph.nodes if n.op == "placeholder" and "tangent" not in n.name)

    @cached_property
    def tangents(self) -> tuple[Node, ...]:
        return tuple(n for n in self.graph.nodes if n.op == "placeholder" and "tangent" in n.name)

    @cached_property
    def output(self) -> Node:
        return self.graph.output_node()

    @property
    def results(self) -> Sequence[object]:
        outputs = self.output.args[0]
        assert isinstance(outputs, list | tuple)
        return outputs

    @property
    def num_forward_outputs(self) -> int:
        """Outputs before the gradients; AOTAutograd appends one gradient (or None) per input."""
        return len(self.results) - (len(self.placeholders) if self.tangents else 0)

    @cached_property
    def table(self) -> Node:
        """The scale table: the last captured input."""
        wanted = len(self.inputs) - 1
        return next(n for n in self.placeholders if input_index(n) == wanted)

    def describe(self, node: Node) -> GraphInput:
        return self.inputs[input_index(node)]

    @cached_property
    def gradients(self) -> dict[Node, tuple[int, Node]]:
        """Map each input with a gradient to (position in the outputs, gradient node)."""
        found: dict[Node, tuple[int, Node]] = {}
        grads = list(enumerate(self.results))[self.num_forward_outputs :]
        if not self.tangents:
            return found
        for placeholder, (position, grad) in zip(self.placeholders, grads, strict=True):
            if isinstance(grad, Node):
                found[placeholder] = (position, grad)
        return found

    def forward_nodes(self) -> Iterator[Node]:
        """Yield the forward ``call_function`` nodes in execution order, mutation write-backs left out."""
        for node in self.graph.nodes:
            if node.op == "call_function" and not is_backward(node) and node.target not in ops.MUTATIONS:
                yield node

    def backward_nodes(self) -> Iterator[Node]:
        for node in self.graph.nodes:
            if node.op == "call_function" and is_backward(node):
                yield node
