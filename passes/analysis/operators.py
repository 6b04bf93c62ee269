"""Recover the operators that the model called from the decomposed joint graph.

Autograd gives forward and backward nodes of one operator the same ``seq_nr``, and decompositions keep the operator's
name in ``original_aten``. An operator is a run of consecutive nodes that agree in both.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from torch.fx import Node

from fxprec.passes.analysis import ops
from fxprec.passes.analysis.inputs import module_path
from fxprec.passes.analysis.joint import JointGraph, input_at
from fxprec.passes.analysis.values import is_differentiable


@dataclass(eq=False)
class Operator:
    """One operator of the model: its forward run, its outputs and its backward nodes."""

    id: int
    aten: str  # "aten.convolution"
    nodes: list[Node]
    module: str
    source: str
    seq_nr: int | None
    is_gemm: bool
    outputs: list[Node] = field(default_factory=list)  # floats and complex numbers read by other operators or the user
    inputs: list[Node] = field(default_factory=list)  # values from other operators and from the graph's inputs
    backward: list[Node] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return the name of the operator's first output, which plans and messages use."""
        return (self.outputs[0] if self.outputs else self.nodes[-1]).name

    @property
    def is_view(self) -> bool:
        """Return whether the operator only moves data. Group norm's decomposition begins with a view, then computes."""
        moves = ops.VIEWS | {operator.getitem}
        return self.nodes[0].meta.get("original_aten") in ops.VIEWS or all(node.target in moves for node in self.nodes)


@dataclass(frozen=True)
class Operators:
    """All operators in execution order, and maps from nodes to operators."""

    joint: JointGraph
    all: Sequence[Operator]

    @cached_property
    def of_node(self) -> dict[Node, Operator]:
        """Return the operator that each forward node is part of."""
        return {node: op for op in self.all for node in op.nodes}

    @cached_property
    def of_backward_node(self) -> dict[Node, Operator]:
        """Return the operator whose backward each backward node is part of."""
        return {node: op for op in self.all for node in op.backward}

    def base(self, node: Node) -> Node:
        """Follow views and layout copies back to the value they show: an operator's output or an input."""
        while (op := self.of_node.get(node)) is not None and op.is_view:
            sources = [n for n in op.inputs if is_differentiable(n)]
            if not sources:
                break
            node = sources[0]
        return node

    @cached_property
    def accumulations(self) -> frozenset[Node]:
        """Return the backward additions that autograd's engine inserted because a value has several consumers."""
        last = max((op.seq_nr for op in self.all if op.seq_nr is not None), default=None)
        return frozenset(
            node
            for node in self.joint.backward_nodes()
            if node.target is ops.aten.add.Tensor
            and str(node.meta.get("original_aten")) == "aten.add.Tensor"
            and node.meta.get("seq_nr") == last
            and all(arg in self._gradients for arg in node.args)
        )

    @cached_property
    def _gradients(self) -> frozenset[Node]:
        """Return the tangents and the nodes that depend on one."""
        return frozenset(self.joint.made_of_tangents())


def recover_operators(joint: JointGraph) -> Operators:
    """Group the forward nodes into operators, and assign backward nodes to each operator."""
    found: list[Operator] = []
    for node in joint.forward_nodes():
        run = _continued_run(found, node)
        if run is not None:
            run.nodes.append(node)
        else:
            found.append(_new_operator(len(found), node))
    operators = Operators(joint, found)
    _link_values(operators)
    _pair_backward(operators)
    return operators


def _continued_run(found: list[Operator], node: Node) -> Operator | None:
    if node.target is operator.getitem:
        return next((op for op in reversed(found) if input_at(node, 0) in op.nodes), None)
    if not found or _is_whole(found[-1].nodes[0]):
        return None
    last = found[-1]
    same = _origin(node) == (last.aten, last.module, last.source, last.seq_nr)
    continues = not _is_whole(node) or any(arg in last.nodes for arg in node.all_input_nodes)
    return last if same and continues else None


def _is_whole(node: Node) -> bool:
    """Return whether the node is the operator itself, not a part of its decomposition."""
    return node.target is node.meta.get("original_aten", node.target)


def _new_operator(index: int, node: Node) -> Operator:
    aten, module, source, seq_nr = _origin(node)
    return Operator(index, aten, [node], module, source, seq_nr, is_gemm=node.target in ops.GEMMS)


def _origin(node: Node) -> tuple[str, str, str, int | None]:
    """Return the operator that a node is part of, its module and source line, and autograd's number."""
    aten = str(node.meta.get("original_aten", node.target)).rpartition(".")[0] or str(node.target)
    return aten, module_of(node), source_of(node), node.meta.get("seq_nr")


def module_of(node: Node) -> str:
    """Return the path of the innermost module as the user writes it, ``layer1.0.conv1``."""
    stack = node.meta.get("nn_module_stack")
    return module_path(stack[next(reversed(stack))][0]) if stack else ""


def source_of(node: Node) -> str:
    """Return ``file.py:line`` of the user's innermost frame."""
    return _innermost(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=4096)
def _innermost(stack_trace: str) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack_trace)
    return f"{frames[-1][0].rpartition('/')[2]}:{frames[-1][1]}" if frames else ""


def _link_values(operators: Operators) -> None:
    """Fill ``inputs`` and ``outputs``: values that one operator computes and another operator or the user reads."""
    of_node, joint = operators.of_node, operators.joint
    returned = _returned(joint)
    for op in operators.all:
        inside = set(op.nodes)
        op.inputs = list(dict.fromkeys(n for node in op.nodes for n in node.all_input_nodes if n not in inside))
        op.outputs = [
            node
            for node in op.nodes
            if is_differentiable(node)
            and (node in returned or any(u in of_node and u not in inside for u in node.users))
        ]


def _returned(joint: JointGraph) -> set[Node]:
    """Return the forward values that the user gets, without the new values of buffers."""
    count = joint.num_forward_outputs
    descs = joint.output.meta.get("desc") or [None] * count
    return {
        result
        for result, desc in zip(joint.results[:count], descs[:count], strict=True)
        if isinstance(result, Node) and "Mutation" not in type(desc).__name__
    }


def _pair_backward(operators: Operators) -> None:
    """Assign each backward node to the operator with its ``seq_nr`` that autograd recorded.

    That is the first operator with the number. A nested tensor records its linear layer as a whole, and runs a view and
    a GEMM with one number: there the owner is the GEMM, because backward multiplies and a view's backward does not.
    """
    by_seq: dict[int, list[Operator]] = defaultdict(list)
    for op in operators.all:
        if op.seq_nr is not None and (op.outputs or op.is_gemm):
            by_seq[op.seq_nr].append(op)
    backward: dict[int, list[Node]] = defaultdict(list)
    for node in operators.joint.backward_nodes():
        if (seq_nr := node.meta.get("seq_nr", -1)) in by_seq and node not in operators.accumulations:
            backward[seq_nr].append(node)
    for seq_nr, nodes in backward.items():
        owner = by_seq[seq_nr][0]
        if owner.is_view and any(node.target in ops.GEMMS for node in nodes):
            owner = next((op for op in by_seq[seq_nr] if op.is_gemm), owner)
        owner.backward += nodes
