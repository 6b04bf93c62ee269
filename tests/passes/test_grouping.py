"""Groups by data flow against a plain union-find, on random graphs."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node
from union_find import Classes

from fxprec.passes.analysis.grouping import by_dataflow, by_execution
from fxprec.passes.analysis.groups import group_tensors
from fxprec.passes.analysis.inputs import GraphInput
from fxprec.passes.analysis.joint import JointGraph
from fxprec.passes.analysis.operators import Operators, recover_operators

aten = torch.ops.aten
SQUARE = torch.zeros(4, 4)


class Drawn:
    """An inference graph written by hand, and the classes of its values that a union-find makes of it."""

    def __init__(self, inputs: int, params: int) -> None:
        self.graph, self.classes, self.shows = Graph(), Classes(), {}
        self.kinds = ["input"] * inputs + ["param"] * params
        self.values = [self._named(self.graph.placeholder(f"primals_{i + 1}")) for i in range(len(self.kinds))]
        for x in self.values[:inputs]:
            self.classes.add(x)

    def _named(self, node: Node) -> Node:
        node.meta |= {"val": SQUARE, "seq_nr": len(self.graph.nodes)}
        self.shows[node] = node
        return node

    def call(self, target: object, *args: Node) -> Node:
        node = self._named(self.graph.call_function(target, args))
        node.meta["original_aten"] = target
        read = [self.shows[a] for a in args]
        if target is aten.t.default:
            self.shows[node] = read[0]
        elif target is aten.mm.default:
            self.classes.add(node)
        else:
            self.classes.add(node, *(a for a in read if a in self.classes.parent))
        self.values.append(node)
        return node

    def operators(self) -> Operators:
        last = self.values[-1]
        self.graph.output([v for v in self.values if v is last or (not v.users and v.op != "placeholder")])
        given = [GraphInput(f"x{i}", kind, "") for i, kind in enumerate(self.kinds)]
        return recover_operators(JointGraph(self.graph, given))


def random_graph(seed: int) -> Drawn:
    draw = random.Random(seed)
    drawn = Drawn(draw.randint(1, 3), draw.randint(0, 3))
    for _ in range(draw.randint(1, 25)):
        target = draw.choice([aten.relu.default, aten.add.Tensor, aten.mm.default, aten.mm.default, aten.t.default])
        count = 1 if target in (aten.relu.default, aten.t.default) else 2
        drawn.call(target, *draw.choices(drawn.values, k=count))
    return drawn


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6))
def test_regions_are_the_classes_of_a_union_find(seed):
    drawn = random_graph(seed)
    operators = drawn.operators()
    found = by_dataflow(operators)
    placed = {op.nodes[0]: found.of_operator[op] for op in operators.all if not op.is_view} | dict(found.of_input)
    pairs = {(drawn.classes.root(node), group) for node, group in placed.items()}
    assert len(pairs) == len({root for root, _ in pairs}) == len({group for _, group in pairs}), "one group a class"
    assert {group for _, group in pairs} == set(range(found.num_groups))


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6))
def test_groups_are_numbered_as_operators_touch_them(seed):
    operators = random_graph(seed).operators()
    found = by_dataflow(operators)
    seen: list[int] = []
    for op in operators.all:
        if not op.is_view:
            bases = map(operators.base, op.inputs)
            makers = ((operators.of_node.get(n), n) for n in bases)
            seen += [found.of_operator[m] if m else found.of_input[n] for m, n in makers if m or n in found.of_input]
            seen.append(found.of_operator[op])
    first = list(dict.fromkeys(seen))
    assert first == sorted(first)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6))
def test_along_a_chain_both_groupings_agree(seed):
    draw = random.Random(seed)
    drawn = Drawn(1, 1)
    x, w = drawn.values
    for _ in range(draw.randint(1, 12)):
        x = drawn.call(aten.mm.default, x, w) if draw.random() < 0.4 else drawn.call(aten.relu.default, x)
    operators = drawn.operators()
    flow, order = by_dataflow(operators), by_execution(operators)
    assert (flow.num_groups, flow.borders) == (order.num_groups, order.borders)
    assert (flow.of_operator, flow.of_input) == (order.of_operator, order.of_input)


def test_a_residual_stream_is_one_region_and_a_gemm_may_lead_back_into_it():
    drawn = Drawn(1, 2)
    x, w, v = drawn.values
    inner = drawn.call(aten.relu.default, drawn.call(aten.mm.default, x, w))
    drawn.call(aten.relu.default, drawn.call(aten.add.Tensor, x, drawn.call(aten.mm.default, inner, v)))
    operators = drawn.operators()
    assert by_dataflow(operators).borders == [(0, 1), (1, 0)]
    grouped = group_tensors(operators, "dataflow")
    where = {t.name.replace("_default", "").replace("_tensor", ""): t.group for t in grouped.tensors}
    assert where == {"x0": 0, "x1": 0, "mm": 1, "relu": 1, "x2": 1, "mm_1": 0, "add": 0, "relu_1": 0}
    ends = {t.name for t in grouped.tensors if t.id in grouped.ends}
    assert ends == {"mm_default"} | {t.name for t in grouped.tensors if t.group == 0}, "of region 1 the result alone"


def test_what_depends_on_no_datum_joins_nothing():
    """A mask of constants, shared by two regions, lies where it is first read."""
    drawn = Drawn(1, 1)
    x, w = drawn.values
    zeros = drawn._named(drawn.graph.call_function(aten.full.default, ([4, 4], -1e9)))
    a = drawn.call(aten.add.Tensor, drawn.call(aten.mm.default, x, w), zeros)
    drawn.call(aten.add.Tensor, drawn.call(aten.mm.default, a, w), zeros)
    operators = drawn.operators()
    found = by_dataflow(operators)
    assert found.borders == [(0, 1), (1, 2)]
    assert found.of_operator[operators.of_node[zeros]] == 1
