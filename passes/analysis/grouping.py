"""Form groups of operators by execution order, as in the paper, or by data flow.

**execution** (Lee et al. 2023, section 4.1). Group 0 opens with the graph's inputs, and each GEMM opens the next group.
An operator belongs to the group of the last GEMM that ran before it, related or not. GEMM i stands between groups i and
i + 1.

**dataflow**. Without its GEMMs the graph falls apart into regions:

- The vertices are the floating-point inputs, the GEMMs, and the operators that read or compute a *datum*: a
  floating-point value that a GEMM computed, or that depends on such an input or on a parameter. Views are no
  vertices: a reader of a view reads the tensor that it shows.
- An operator that is no GEMM has an edge to the maker of each datum that it reads. A GEMM has no edge to its operands,
  and so its result opens the region of its readers. Parameters and buffers have no maker, and so no edges.
- The groups are the connected components, numbered in the order in which operators first touch them: an operator
  touches its inputs, then its outputs. Inputs that no operator touches come last, in call order.
- An operator that is no vertex (masks, indices, constants) belongs to the group of the first operator that reads its
  result.

GEMM i stands between the group of its first operand that is a datum and the group of its result. Both may be the same,
several GEMMs may open one group, and there may be more or fewer groups than GEMMs. Along a chain both groupings agree.

Under both groupings a parameter belongs to the group of the first input of the operator that uses the parameter first.
If this input is no datum, the parameter belongs to that operator's group. A gradient belongs to the group of its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import networkx as nx
from torch.fx import Node

from fxprec.config.config import GroupingName
from fxprec.passes.analysis.joint import factors_of
from fxprec.passes.analysis.operators import Operator, Operators
from fxprec.passes.analysis.values import is_differentiable

Vertex: TypeAlias = Operator | Node


@dataclass(frozen=True)
class Grouping:
    """The group of each operator and of each input."""

    name: GroupingName
    num_groups: int
    of_operator: Mapping[Operator, int]
    of_input: Mapping[Node, int]
    """Inputs without a group are left out."""
    borders: Sequence[tuple[int, int]]
    """The groups before and after each GEMM."""


def by_execution(operators: Operators) -> Grouping:
    """Open a group at every GEMM."""
    of_operator: dict[Operator, int] = {}
    gemms = 0
    for op in operators.all:
        gemms += op.is_gemm
        of_operator[op] = gemms
    of_input = dict.fromkeys(operators.joint.used_inputs, 0)
    return Grouping("execution", gemms + 1, of_operator, of_input, [(i, i + 1) for i in range(gemms)])


def by_dataflow(operators: Operators) -> Grouping:
    """Remove the GEMMs from the graph; the groups are the connected components that remain."""
    graph = _without_gemms(operators)
    group_of = _numbered(operators, graph)
    of_operator = {op: group_of[op] for op in operators.all if op in group_of}
    for op in reversed(operators.all):
        if op not in of_operator:
            readers = (operators.of_node.get(user) for node in op.nodes for user in node.users)
            later = [r for r in readers if r is not None and r is not op]
            of_operator[op] = of_operator[min(later, key=lambda r: r.id)] if later else 0
    of_input = {v: g for v, g in group_of.items() if isinstance(v, Node)}
    borders = [(_before(op, operators, group_of), of_operator[op]) for op in operators.all if op.is_gemm]
    return Grouping("dataflow", max(group_of.values(), default=0) + 1, of_operator, of_input, borders)


def _without_gemms(operators: Operators) -> nx.Graph[Vertex]:
    """Return the graph whose components are the regions."""
    data = _data(operators)
    graph: nx.Graph[Vertex] = nx.Graph()
    graph.add_nodes_from(n for n in operators.joint.used_inputs if n in data)
    for op in operators.all:
        reads = any(n in data for n in op.inputs)
        if op.is_gemm or (not op.is_view and (reads or any(n in data for n in op.outputs))):
            graph.add_node(op)
            if not op.is_gemm:
                graph.add_edges_from((maker, op) for maker in _makers(op, operators) if maker in graph)
    return graph


def _data(operators: Operators) -> set[Node]:
    """Return the floating-point values that depend on a floating-point input or a parameter."""
    joint = operators.joint
    reached = {n for n in joint.placeholders if joint.describe(n).kind in ("input", "param") and is_differentiable(n)}
    for op in operators.all:
        if op.is_gemm or any(n in reached for n in op.inputs):
            reached.update(op.nodes)
    return {n for n in reached if is_differentiable(n)}


def _makers(op: Operator, operators: Operators) -> Iterator[Vertex]:
    """Yield the makers of the values that an operator reads, seen through views: operators and inputs of the graph."""
    for node in op.inputs:
        if is_differentiable(node):
            base = operators.base(node)
            yield operators.of_node.get(base, base)


def _numbered(operators: Operators, graph: nx.Graph[Vertex]) -> dict[Vertex, int]:
    """Return the component of each vertex, numbered as operators touch them."""
    component_of = {v: component for component in map(frozenset, nx.connected_components(graph)) for v in component}
    touched: list[Vertex] = []
    for op in operators.all:
        if op in graph:
            touched += [maker for maker in _makers(op, operators) if maker in graph]
            touched.append(op)
    touched += operators.joint.used_inputs
    number: dict[frozenset[Vertex], int] = {}
    for vertex in touched:
        if vertex in graph:
            number.setdefault(component_of[vertex], len(number))
    return {v: number[component] for v, component in component_of.items()}


def _before(gemm: Operator, operators: Operators, group_of: Mapping[Vertex, int]) -> int:
    """Return the group of a GEMM's first operand that has a group, or the GEMM's own group."""
    for factor in factors_of(gemm.nodes[0]):
        base = operators.base(factor)
        maker = operators.of_node.get(base, base)
        if maker in group_of:
            return group_of[maker]
    return group_of[gemm]


GROUPINGS: Mapping[str, Callable[[Operators], Grouping]] = MappingProxyType(
    {"execution": by_execution, "dataflow": by_dataflow}
)
