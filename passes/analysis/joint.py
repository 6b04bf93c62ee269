"""A read-only view of AOTAutograd's joint graph: inputs, outputs, forward and backward halves."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxprec import compat
from fxprec.ir.symbolic import TABLE_COLUMNS
from fxprec.passes.analysis import descriptors, ops
from fxprec.passes.analysis.inputs import GraphInput, InputKind


def input_index(node: Node) -> int | None:
    """Return the captured input that a placeholder is, or is a part of; None for inputs that AOTAutograd adds."""
    desc = node.meta.get("desc")
    if desc is not None:
        return descriptors.captured_index(desc)
    number = node.name.rpartition("_")[2]
    return int(number) - 1 if number.isdecimal() else None


def is_backward(node: Node) -> bool:
    """Return whether a node belongs to the backward half."""
    return node.meta.get("partitioner_tag") == "is_backward" or bool(node.meta.get("autograd_backward"))


def value(node: Node) -> torch.Tensor | None:
    """Return the node's fake tensor, or None if the node's value is not a tensor."""
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def tensor_of(node: Node) -> torch.Tensor:
    """Return the fake tensor of a node. Fails an assertion if the node's value is not a tensor."""
    val = value(node)
    assert val is not None, f"{node.format_node()} holds no tensor"
    return val


def is_dense(val: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory, each place once, in any order of its dimensions."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(val))


def memory_order(val: torch.Tensor) -> list[int]:
    """Return a dense tensor's dimensions from slowest to fastest in memory."""
    return list(range(val.ndim)) if val.is_contiguous() else sorted(range(val.ndim), key=lambda d: -val.stride()[d])


def input_at(node: Node, position: int) -> Node:
    """Return the argument at ``position``. Fails an assertion if the argument is not a node."""
    arg = node.args[position]
    assert isinstance(arg, Node), f"{node.format_node()}: argument {position} is no node"
    return arg


def unconverted(node: Node) -> Node:
    """Return the operand of a conversion to another dtype, or the node itself if the node is no conversion."""
    return input_at(node, 0) if node.target is ops.CONVERT else node


def argument(node: Node, position: int, default: object = None) -> object:
    """Return the argument at ``position``, or ``default`` if the call leaves it out."""
    return node.args[position] if position < len(node.args) else default


def item_of(node: Node) -> tuple[Node, Any] | None:
    """Return (operator with several results, index of one) if ``node`` takes one of them, else None.

    The index is an int; a str for a kernel that a user wrote in Triton.
    """
    if node.target is not operator.getitem:
        return None
    _, index = node.args
    assert isinstance(index, int | str), f"{node.format_node()} takes no single result"
    return input_at(node, 0), index


def is_view(node: Node) -> bool:
    """Return whether a node only shows or moves another node's data. A piece of a split counts."""
    item = item_of(node)
    return (node if item is None else item[0]).target in ops.VIEWS


def is_view_or_cast(node: Node) -> bool:
    """Return whether a node is a view of another, or a cast."""
    return is_view(node) or node.target in ops.CASTS


def readers(node: Node, shows: Callable[[Node], bool] = is_view) -> Iterator[tuple[Node, Node]]:
    """Yield (node that is read, its reader), seen through nodes for which ``shows`` holds: views by default."""
    for user in node.users:
        if shows(user):
            yield from readers(user, shows)
        else:
            yield node, user


def shown(node: Node, shows: Callable[[Node], bool] = is_view) -> tuple[Node, list[Node]]:
    """Return the source of a chain of nodes for which ``shows`` holds, and that chain from ``node`` upwards."""
    found = []
    while shows(node) and len(node.all_input_nodes) == 1:
        found.append(node)
        node = node.all_input_nodes[0]
    return node, found


def has_tag(node: Node, tag: torch.Tag) -> bool:
    """Return whether torch tags the node's operator with ``tag``: ``pointwise``, ``nondeterministic_seeded``."""
    return isinstance(node.target, torch._ops.OpOverload) and tag in node.target.tags


def made_by(node: Node) -> Node:
    """Return the operator that computes ``node``: for one of several results the node that returns them all."""
    item = item_of(node)
    return node if item is None else item[0]


def operator_of(node: Node) -> Callable[..., object]:
    """Return the function that a ``call_function`` node calls."""
    assert callable(node.target), f"{node.format_node()} calls no function"
    return node.target


def results_of(graph: Graph) -> Sequence[object]:
    """Return the results of a graph."""
    (results,) = graph.output_node().args
    assert isinstance(results, list | tuple)
    return results


def behind_inputs(graph: Graph) -> Node:
    """Return the node behind a graph's inputs. AOTAutograd makes tokens of operators with effects before the inputs."""
    inputs: Sequence[Node] = [*graph.find_nodes(op="placeholder")]
    return inputs[-1].next


def set_results(graph: Graph, results: list[Any]) -> None:
    """Make a graph return ``results``."""
    graph.output_node().args = (tuple(results) if isinstance(results_of(graph), tuple) else results,)


def factors_of(gemm: Node) -> list[Node]:
    """Return the nodes that a GEMM multiplies; an empty list if ``gemm`` is no GEMM."""
    factors = (argument(gemm, position) for position in ops.GEMM_OPERANDS.get(gemm.target, ()))
    return [factor for factor in factors if isinstance(factor, Node)]


def numel_expr(val: torch.Tensor) -> sympy.Expr:
    """Return the number of elements as a sympy expression in the dynamic dimensions."""
    expr: sympy.Expr = sympy.Integer(1)
    for size in val.shape:
        expr = expr * (size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size)))
    return expr


def bytes_of(val: torch.Tensor) -> int:
    """Return the bytes of a tensor at the traced sizes."""
    return numel_hint(val) * val.dtype.itemsize


def dim_hint(size: int | torch.SymInt) -> int:
    """Return the value that a size had when the graph was traced, or an assumed one: see `compat.traced_size`."""
    return compat.traced_size(size)


def numel_hint(val: torch.Tensor) -> int:
    """Return the number of elements at the traced sizes."""
    count = 1
    for size in val.shape:
        count *= dim_hint(size)
    return count


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape at all sizes; unlike ``==`` this adds no guard on sizes."""
    pairs = zip(a.shape, b.shape, strict=True) if a.ndim == b.ndim else [(0, 1)]
    return all(bool(statically_known_true(x == y)) for x, y in pairs)


def shape_text(val: torch.Tensor) -> str:
    """Return ``"s0 x 64 x 32"``; a scalar is ``"1"``."""
    return " x ".join(str(size) for size in val.shape) or "1"


# An inner tensor that has a subclass's whole content, as a DTensor's local shard, keeps the subclass's name.
_MAIN_PARTS = frozenset({"_local_tensor"})


@dataclass(frozen=True)
class JointGraph:
    """The joint graph with its inputs, its results and its two halves. An inference graph has no backward half."""

    graph: Graph
    inputs: Sequence[GraphInput]

    @cached_property
    def placeholders(self) -> tuple[Node, ...]:
        """Return the forward inputs."""
        return tuple(n for n in self.graph.find_nodes(op="placeholder") if not self.is_tangent(n))

    @cached_property
    def used_inputs(self) -> tuple[Node, ...]:
        """Return the model's own inputs that at least one node reads."""
        return tuple(n for n in self.placeholders if n.users and self.describe(n).kind == "input")

    @cached_property
    def tangents(self) -> tuple[Node, ...]:
        """Return the inputs that are gradients of the outputs."""
        return tuple(n for n in self.graph.find_nodes(op="placeholder") if self.is_tangent(n))

    @staticmethod
    def is_tangent(node: Node) -> bool:
        """Return whether a node is the gradient of an output, an input of the backward half."""
        return node.op == "placeholder" and "tangent" in node.name

    def in_backward(self, node: Node) -> bool:
        """Return whether a node belongs to the backward half or is a tangent."""
        return is_backward(node) or self.is_tangent(node)

    def made_of_tangents(self) -> set[Node]:
        """Return the tangents and the nodes that depend on one, in the graph's present state."""
        found = set(self.tangents)
        for node in self.graph.nodes:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    @cached_property
    def output(self) -> Node:
        """Return the output node."""
        return self.graph.output_node()

    @property
    def results(self) -> Sequence[object]:
        """Return the graph's results: outputs of forward, then gradients, or None for an input without a gradient."""
        return results_of(self.graph)

    @property
    def num_forward_outputs(self) -> int:
        """Return the number of results before the gradients. Each input has one gradient or None."""
        if not self.tangents:
            return len(self.results)
        descs = self.output.meta.get("desc")
        if not descs:
            return len(self.results) - len(self.placeholders)
        return max((i + 1 for i, desc in enumerate(descs) if descriptors.is_forward_output(desc)), default=0)

    @cached_property
    def differentiated(self) -> frozenset[Node]:
        """Return the forward tensors that backward gets a gradient of: neither counts nor updates of statistics."""
        outputs = self.results[: self.num_forward_outputs]
        descs = self.output.meta.get("desc")
        if descs:
            wanted = [getattr(descriptors.key(t.meta.get("desc"))[0], "output", None) for t in self.tangents]
            outputs = [out for out, desc in zip(outputs, descs, strict=False) if descriptors.key(desc)[0] in wanted]
        return frozenset(out for out in outputs if isinstance(out, Node) and value(out) is not None)

    @cached_property
    def has_table(self) -> bool:
        """Return whether this is the captured graph, rather than a graph nested in it or traced beside it."""
        return self._find_table() is not None

    @cached_property
    def table(self) -> Node:
        """Return the scale table: the last captured input."""
        found = self._find_table()
        assert found is not None
        return found

    @property
    def device(self) -> torch.device:
        """Return the device that the graph runs on."""
        return tensor_of(self.table).device

    def _find_table(self) -> Node | None:
        for node in self.placeholders:
            val = value(node)
            if self.describe(node).kind == "table" and val is not None and val.dtype == torch.int32:
                return node if val.ndim == 2 and val.shape[1] == TABLE_COLUMNS else None
        return None

    @property
    def updates_weights(self) -> bool:
        """Return whether this graph is not a model but steps one: it overwrites weights, or gradients alone.

        A model's own graph overwrites buffers, or inputs if it also has GEMMs.
        """
        if self.tangents:
            return False
        written = {self.describe(n).kind for n in self._overwritten()}
        gemms = (n for n in self.graph.nodes if n.target in ops.GEMMS)
        return "param" in written or ("input" in written and next(gemms, None) is None)

    def _overwritten(self) -> Iterator[Node]:
        """Yield the floating-point inputs that the graph overwrites."""
        for node in self.graph.nodes:
            into = argument(node, 0) if node.target in ops.MUTATIONS else None
            val = value(into) if isinstance(into, Node) and into.op == "placeholder" else None
            if isinstance(into, Node) and val is not None and val.dtype.is_floating_point:
                yield into

    def describe(self, node: Node) -> GraphInput:
        """Return the captured input that a placeholder is, or whose inner tensor it is."""
        index = input_index(node)
        if index is None or index >= len(self.inputs):
            return self._attribute(node) or GraphInput(node.name, "other", "")
        found = self.inputs[index]
        _, path = descriptors.key(node.meta.get("desc"))
        inner = [part for part in path if part not in _MAIN_PARTS]
        return replace(found, name=".".join((found.name, *inner))) if inner else found

    @staticmethod
    def _attribute(node: Node) -> GraphInput | None:
        """Return the input that was an attribute of the captured graph, as an optimizer's tensors are, or None."""
        desc = node.meta.get("desc")
        kinds: dict[str, InputKind] = {"ParamAOTInput": "param", "BufferAOTInput": "buffer"}
        kind = kinds.get(descriptors.kind(desc))
        if kind is None:
            return None
        name = str(getattr(descriptors.key(desc)[0], "target", node.name))
        return GraphInput(name, kind, name.rpartition(".")[0])

    @cached_property
    def gradients(self) -> dict[Node, tuple[int, Node]]:
        """Return (position among the results, gradient node) for each input with a gradient."""
        if not self.tangents:
            return {}
        descs = self.output.meta.get("desc")
        of_input = self._gradients_by_desc(descs) if descs else self._gradients_by_position()
        return {p: (at, g) for p, (at, g) in of_input if isinstance(g, Node) and value(g) is not None}

    @property
    def contiguous_gradients(self) -> tuple[int, ...]:
        """Return the positions of the gradients of contiguous inputs, counted among backward's results."""
        first = self.num_forward_outputs
        return tuple(at - first for node, (at, _) in self.gradients.items() if tensor_of(node).is_contiguous())

    def _gradients_by_desc(self, descs: Sequence[object]) -> Iterator[tuple[Node, tuple[int, object]]]:
        found = {descriptors.gradient_of(desc): (i, self.results[i]) for i, desc in enumerate(descs)}
        for node in self.placeholders:
            wanted = descriptors.key(node.meta.get("desc"))
            if wanted in found:
                yield node, found[wanted]

    def _gradients_by_position(self) -> Iterator[tuple[Node, tuple[int, object]]]:
        first = self.num_forward_outputs
        for i, (node, gradient) in enumerate(zip(self.placeholders, self.results[first:], strict=True)):
            yield node, (first + i, gradient)

    def stepped(self, inputs: Collection[int]) -> Iterator[tuple[Node, int, Node]]:
        """Yield (parameter, position of its gradient among the results, gradient) for each of these captured inputs.

        A step's kernel takes one dtype. So a gradient in another dtype than its parameter's stays a result.
        """
        for parameter, (at, _) in self.gradients.items():
            gradient = self.results[at]
            if not isinstance(gradient, Node) or input_index(parameter) not in inputs:
                continue
            if tensor_of(parameter).dtype == tensor_of(gradient).dtype:
                yield parameter, at, gradient

    def returned_for(self, tangent: Node) -> Node | None:
        """Return the forward output that ``tangent`` is the gradient of, or None."""
        whole, path = descriptors.key(tangent.meta.get("desc"))
        wanted = (getattr(whole, "output", None), path)
        descs = self.output.meta.get("desc") or ()
        for result, desc in zip(self.results, descs, strict=False):
            if isinstance(result, Node) and wanted[0] is not None and descriptors.key(desc) == wanted:
                return result
        return None

    def forward_nodes(self) -> Iterator[Node]:
        """Yield the forward ``call_function`` nodes in execution order, without the write-backs of mutations."""
        for node in self.graph.nodes:
            if node.op == "call_function" and not is_backward(node) and node.target not in ops.MUTATIONS:
                yield node

    def backward_nodes(self) -> Iterator[Node]:
        """Yield the backward ``call_function`` nodes in graph order."""
        for node in self.graph.nodes:
            if node.op == "call_function" and is_backward(node):
                yield node
