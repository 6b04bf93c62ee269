"""A value is written once in 16 bits, and read as it was written."""

from __future__ import annotations

import pytest
import torch
from one_pass import run_pass
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

from fxprec.kernels.layout import SideBySide
from fxprec.passes.drop_round_trips import DropRoundTrips
from fxprec.passes.lowering.conversions import share_conversions
from fxprec.passes.lowering.pieces import narrow_in_pieces
from fxprec.passes.sum_narrow import SumNarrow

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
BF16, F32 = torch.bfloat16, torch.float32


class _Graph(Graph):
    def add(self, target, *args) -> Node:
        node = self.call_function(target, args)
        node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def give(self, x: torch.Tensor) -> Node:
        node = self.placeholder(f"x{len(self.nodes)}")
        node.meta["val"] = x
        return node

    def run(self, *args: torch.Tensor):
        self.lint()
        return torch.fx.Interpreter(torch.fx.GraphModule({}, self)).run(*args)

    def count(self, target) -> int:
        return len(self.find_nodes(op="call_function", target=target))


class _Work:
    def __init__(self, graph: Graph) -> None:
        self.joint = self
        self.graph = graph

    def in_backward(self, node: Node) -> bool:
        return True


def gradient_of_a_linear(dims: list[int]) -> tuple[_Graph, Node]:
    """A gradient that GEMMs read in bfloat16, twice, and that is summed over ``dims`` through a view."""
    graph = _Graph()
    wide = graph.add(aten.mul.Tensor, graph.give(torch.randn(2, 8, 16)), 1.5)
    narrow, again = (graph.add(CONVERT, wide, BF16) for _ in range(2))
    flat = graph.add(aten.view.default, wide, [16, 16])
    total = graph.add(aten.sum.dim_IntList, flat, dims)
    graph.output((narrow, again, total))
    return graph, total


def test_a_sum_over_rows_reads_the_copy_that_gemms_read():
    graph, total = gradient_of_a_linear([0])
    SumNarrow().apply(_Work(graph))
    share_conversions(graph)
    x = torch.randn(2, 8, 16)
    narrow, again, found = graph.run(x)
    assert narrow is again, "converted once"
    read = total.all_input_nodes[0]
    assert (read.target, read.meta["val"].dtype) == (CONVERT, F32)
    assert torch.equal(found, (x * 1.5).to(BF16).to(F32).view(16, 16).sum(0)), "summed in float32"


def test_a_sum_over_the_last_dimension_stays_in_registers():
    graph, total = gradient_of_a_linear([-1])
    SumNarrow().apply(_Work(graph))
    assert total.all_input_nodes[0].target is aten.view.default


def test_under_autocast_a_table_of_positions_sums_the_float32_gradient_as_it_was_traced() -> None:
    """That gradient is converted for the layer in front of the addition alone."""
    layers = torch.nn.Linear(8, 512), torch.nn.Linear(512, 512)
    table = torch.nn.Parameter(torch.randn(16, 512))

    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            embedded = layers[0](x) + table
            return (embedded + layers[1](torch.tanh(embedded))).float()

    ran = run_pass("sum-narrow", model, torch.randn(64, 16, 8), recipe="fp8", storage="native")
    (total,) = (n for n in ran.nodes(aten.sum.dim_IntList) if n.meta["val"].shape == (1, 16, 512))
    assert total.all_input_nodes[0].target is not CONVERT
    assert total.all_input_nodes[0].meta["val"].dtype == F32


def test_a_relu_in_a_recomputed_region_is_compared_as_the_gemm_behind_it_reads_it():
    """Else backward would write it a second time, in float32, to ask where it is 0."""
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)
    )

    def region(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layers, x, use_reentrant=False)

    ran = run_pass("sum-narrow", region, torch.randn(2, 2, 8, 8), recipe="fp8", storage="native")
    (mask,) = ran.nodes(aten.le.Scalar)
    read = mask.all_input_nodes[0]
    assert (read.target, read.meta["val"].dtype) == (CONVERT, BF16)
    assert aten.convolution.default in {user.target for user in read.users}


@pytest.mark.parametrize("mixed", [False, True])
def test_what_is_joined_wide_is_joined_as_it_was(mixed: bool):
    graph = _Graph()
    q, k = (graph.give(torch.randn(2, 4, 8, dtype=BF16)) for _ in range(2))
    pieces = [graph.add(aten.permute.default, graph.add(CONVERT, x, F32), [1, 0, 2]) for x in (q, k)]
    if mixed:
        pieces[1] = graph.add(aten.mul.Tensor, pieces[1], 2.0)
    joined = graph.add(aten.cat.default, pieces, 2)
    graph.output((graph.add(CONVERT, joined, BF16), graph.add(aten.sum.dim_IntList, joined, [0])))
    args = [torch.randn(2, 4, 8).to(BF16) for _ in range(2)]
    wanted = graph.run(*args)
    DropRoundTrips().apply(_Work(graph))
    graph.eliminate_dead_code()
    found = graph.run(*args)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    (cat,) = graph.find_nodes(op="call_function", target=aten.cat.default)
    assert cat.meta["val"].dtype == (F32 if mixed else BF16)
    assert graph.count(CONVERT) == (3 if mixed else 1)


def test_what_is_joined_and_then_narrowed_is_narrowed_in_pieces() -> None:
    graph = _Graph()
    a, b = (graph.give(torch.randn(2, 3, 4)) for _ in range(2))
    grown = graph.add(aten.exp.default, a)
    joined = graph.add(aten.cat.default, [grown, graph.add(aten.mul.Tensor, b, b), grown], -1)
    narrow = graph.add(CONVERT, joined, BF16)
    graph.output((narrow,))
    inputs = [x.meta["val"] for x in (a, b)]
    (wanted,) = torch.fx.GraphModule({}, graph)(*inputs)
    narrow_in_pieces(graph)
    graph.lint()
    assert not graph.find_nodes(op="call_function", target=aten.cat.default)
    (joins,) = SideBySide.nodes(graph)
    assert [piece.args[1] for piece in SideBySide.of(joins).pieces] == [BF16] * 3
    (found,) = torch.fx.GraphModule({}, graph)(*inputs)
    assert found.dtype == BF16
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("case", ["another dimension", "read elsewhere, too", "copies of what is in memory"])
def test_other_joins_stay(case: str) -> None:
    graph = _Graph()
    a, b = (graph.give(torch.randn(2, 3, 4)) for _ in range(2))
    if case != "copies of what is in memory":
        a, b = (graph.add(aten.exp.default, x) for x in (a, b))
    joined = graph.add(aten.cat.default, [a, b], 1 if case == "another dimension" else -1)
    results = [graph.add(CONVERT, joined, BF16)]
    if case == "read elsewhere, too":
        results.append(graph.add(aten.neg.default, joined))
    graph.output(tuple(results))
    narrow_in_pieces(graph)
    assert graph.find_nodes(op="call_function", target=aten.cat.default)
