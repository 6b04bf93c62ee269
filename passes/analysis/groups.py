"""Count the tensors of a training step, group by group (Lee et al. 2023, section 4.1).

Definitions: docs/algorithms.md, "Operators, tensors, groups".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy
import torch
from torch.fx import Node

from fxprec.config.config import GroupingName
from fxprec.errors import LoweringError
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.grouping import GROUPINGS, Grouping
from fxprec.passes.analysis.joint import JointGraph, factors_of, numel_expr, numel_hint, shape_text, tensor_of
from fxprec.passes.analysis.operators import Operator, Operators
from fxprec.passes.analysis.ops import FLOATS
from fxprec.passes.analysis.tensors import CountedTensor, Kind
from fxprec.passes.analysis.values import is_differentiable, is_float_tensor, is_plain_float
from fxprec.plan.lines import named
from fxprec.plan.plan import GemmNames


@dataclass(frozen=True)
class Grouped:
    """The counted tensors of a graph and their nodes.

    ``values`` maps a forward tensor's node to its `CountedTensor`; ``grads`` maps the same node to the counted gradient
    of that value.
    """

    operators: Operators
    grouping: Grouping
    tensors: Sequence[CountedTensor]
    values: Mapping[Node, CountedTensor]
    grads: Mapping[Node, CountedTensor]

    @cached_property
    def gemms(self) -> Sequence[Operator]:
        """Return the GEMMs in execution order."""
        return [op for op in self.operators.all if op.is_gemm]

    @cached_property
    def ends(self) -> frozenset[int] | None:
        """Return the ids of the first GEMM's operands, parameters, results and gradients, and of all in the last group.

        None if the groups are in execution order, which determines these tensors by itself.
        """
        if self.grouping.name == "execution" or not self.gemms:
            return None
        first = self.gemms[0]
        nodes = {self.operators.base(n) for n in first.inputs} | set(first.outputs)
        beside = {held[n].id for held in (self.values, self.grads) for n in nodes if n in held}
        computing = [op for op in self.operators.all if op.outputs and not op.is_view]  # none: all tensors are empty
        last = self.group_of[computing[-1]] if computing else None
        return frozenset(beside) | {t.id for t in self.tensors if t.group == last}

    @property
    def gemms_by_name(self) -> GemmNames:
        """Return the operator and the module of each GEMM, as `Plan.gemms_by_name` does."""
        return tuple((op.aten, op.module) for op in self.gemms)

    @property
    def num_groups(self) -> int:
        """Return the number of groups."""
        return self.grouping.num_groups

    @property
    def group_of(self) -> Mapping[Operator, int]:
        """Return the group of each operator."""
        return self.grouping.of_operator

    def group_size(self, group: int) -> sympy.Expr:
        """Return the group's elements as an expression in the dynamic dimensions."""
        return sympy.Add(*self._sizes[group])

    @cached_property
    def _sizes(self) -> Mapping[int, list[sympy.Expr]]:
        sizes: dict[int, list[sympy.Expr]] = defaultdict(list)
        for tensor in self.tensors:
            sizes[tensor.group].append(tensor.size)
        return sizes


def group_tensors(
    operators: Operators, grouping: GroupingName = "execution", *, copies_parameters: bool = True
) -> Grouped:
    """Count the tensors of the operators in execution order, and group them as `GROUPINGS` defines.

    ``copies_parameters``: whether forward makes copies of parameters for backward, which then count as saved.
    """
    return _Walk(operators, GROUPINGS[grouping](operators), copies_parameters).run()


class _Walk:
    """The state of one walk over the operators: the tensors counted so far."""

    def __init__(self, operators: Operators, grouping: Grouping, copies_parameters: bool) -> None:
        self.operators, self.grouping = operators, grouping
        self.joint: JointGraph = operators.joint
        self.tensors: list[CountedTensor] = []
        self.values: dict[Node, CountedTensor] = {}
        self.grads: dict[Node, CountedTensor] = {}
        self.differentiable = _differentiable(operators)
        self.gemm_operands = _gemm_operands(operators)
        self.saved = _saved_for_backward(operators, copies_parameters)

    def run(self) -> Grouped:
        for node in self.joint.used_inputs:
            self._count_value(node, self.grouping.of_input.get(node, 0), None)
        for op in self.operators.all:
            if op.is_view:
                continue
            self._count_params(op)
            self._refuse_mixed(op)
            for node in op.outputs:
                self._count_value(node, self.grouping.of_operator[op], op)
        return Grouped(self.operators, self.grouping, self.tensors, self.values, self.grads)

    def _count_params(self, op: Operator) -> None:
        bases = [self.operators.base(n) for n in op.inputs]
        group = self._group_of_first_input(op, bases)
        for node in bases:
            if node.op != "placeholder" or node in self.values or self.joint.describe(node).kind != "param":
                continue
            self._refuse_float64(node, op.module, op.source)
            if is_plain_float(node):
                self._count(node, "param", group, op)
                if node in self.joint.gradients and is_plain_float(self.joint.gradients[node][1]):
                    self._count(node, "grad_param", group, op)

    def _group_of_first_input(self, op: Operator, bases: Sequence[Node]) -> int:
        """Return the group of an operator's parameters: the group of its first input that is no parameter."""
        for node in bases:
            if node in self.grouping.of_input:
                return self.grouping.of_input[node]
            if (producer := self.operators.of_node.get(node)) is not None:
                return self.grouping.of_operator[producer]
        return self.grouping.of_operator[op]

    def _count_value(self, node: Node, group: int, op: Operator | None) -> None:
        if is_plain_float(node):
            self._count(node, "output", group, op)
        if node in self.differentiable and is_float_tensor(node):  # a mask's gradient has ordinary numbers
            self._count(node, "grad_output", group, op)

    def _count(self, node: Node, kind: Kind, group: int, op: Operator | None) -> None:
        """Count a tensor of the operator ``op`` that computes it, or that is a parameter's first reader."""
        val, is_grad = tensor_of(node), kind.startswith("grad")
        feeds, of_gemm = node in self.gemm_operands, op is not None and op.is_gemm
        tensor = CountedTensor(
            id=len(self.tensors),
            name=self._name(node),
            kind=kind,
            group=group,
            elements=numel_hint(val),
            size=numel_expr(val),
            module="" if op is None else op.module,
            source="" if op is None else op.source,
            feeds_gemm=of_gemm if kind == "grad_output" else feeds,
            of_gemm=feeds if kind == "grad_output" else of_gemm,
            saved=not is_grad and node in self.saved,
            shape=shape_text(val),
        )
        self.tensors.append(tensor)
        (self.grads if is_grad else self.values)[node] = tensor

    def _refuse_float64(self, param: Node, module: str, source: str) -> None:
        """Raise `LoweringError` for a float64 parameter: nothing of a float64 model would be planned."""
        if tensor_of(param).dtype == torch.float64:
            raise LoweringError(_no_float64(self._name(param), module, source))

    def _refuse_mixed(self, op: Operator) -> None:
        """Raise `LoweringError` for a float64 or integer operand beside a float operand, which torch refuses too.

        After narrow-gemms torch's error would name the other operand's 16-bit dtype, which the user did not choose.
        """
        dtypes = {factor: tensor_of(factor).dtype for factor in (factors_of(op.nodes[0]) if op.is_gemm else ())}
        floats = [dtype for dtype in dtypes.values() if dtype in FLOATS]
        other = next((factor for factor, dtype in dtypes.items() if dtype not in FLOATS), None)
        if floats and other is not None:
            name = named(self._name(self.operators.base(other)), op.module, op.source)
            raise LoweringError(
                f"{name} is {_short(dtypes[other])}, and a matrix product multiplies it with {_short(floats[0])}: "
                f"torch refuses that uncompiled too; convert it with .to(torch.{_short(floats[0])})"
            )

    def _name(self, node: Node) -> str:
        return self.joint.describe(node).name if node.op == "placeholder" else node.name


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _no_float64(name: str, module: str, source: str) -> str:
    return (
        f"{named(name, module, source)} is float64: fxprec holds float32, bfloat16 and float16 only; "
        'convert the model with .float(), or compile this part with backend="inductor"'
    )


def _gemm_operands(operators: Operators) -> frozenset[Node]:
    """Return the values that forward GEMMs multiply, seen through views."""
    found: set[Node] = set()
    for op in operators.all:
        if op.is_gemm:
            found.update(operators.base(factor) for factor in factors_of(op.nodes[0]))
    return frozenset(found)


def _saved_for_backward(operators: Operators, copies_parameters: bool) -> frozenset[Node]:
    """Return the forward values (bases) that backward reads; of recomputed regions only the boundary."""
    joint = operators.joint
    found: set[Node] = set()
    if not joint.tangents:
        return frozenset()
    recomputing = [n for n in joint.forward_nodes() if regions.is_marked_recompute(n)]
    for node in (*joint.backward_nodes(), *recomputing):
        for arg in node.all_input_nodes:
            if arg in operators.of_node or (arg.op == "placeholder" and not joint.is_tangent(arg)):
                found.add(operators.base(arg))
    return frozenset(n for n in found if _outlives_forward(n, joint, copies_parameters))


def _outlives_forward(node: Node, joint: JointGraph, copies_parameters: bool) -> bool:
    if node.op == "placeholder":
        return joint.describe(node).kind != "param" or (copies_parameters and not regions.is_read_by_regions_only(node))
    return not regions.is_marked_recompute(node) or regions.is_boundary(node)


def _differentiable(operators: Operators) -> frozenset[Node]:
    """Return the values with a gradient: they depend on an input with a gradient, and an output depends on them."""
    joint = operators.joint
    if not joint.tangents:
        return frozenset()
    forward: set[Node] = set(joint.gradients)
    for op in operators.all:
        if op.aten != "aten.detach" and any(n in forward for n in op.inputs):
            forward.update(n for n in op.nodes if is_differentiable(n))
    reached: set[Node] = set()
    results = joint.results[: joint.num_forward_outputs]
    reached.update(n for n in results if isinstance(n, Node))
    for op in reversed(operators.all):
        if any(n in reached for n in op.nodes):
            reached.update(op.inputs)
            reached.update(op.nodes)
    return frozenset(n for n in forward & reached if n.op != "placeholder" or n in joint.gradients)
