"""Which nodes become one kernel, and in what order kernels can run. Nothing is run here."""

from __future__ import annotations

import random

import pytest
import torch
from generated.kernel_helpers import scale_table, stored, traced
from torch.fx import Graph, GraphModule, Node

from fxprec.ir import symbolic
from fxprec.passes.lowering.triton.regions import find_regions, in_order, outputs

TABLE = scale_table(["1-4-3+4", "1-5-2"])
X = torch.zeros(4, 8)


def regions_of(function, *inputs: torch.Tensor) -> tuple[GraphModule, list[list[str]]]:
    gm = traced(function, *inputs)
    found = in_order(gm.graph, find_regions(gm.graph))
    gm.graph.lint()
    return gm, [[n.name for n in region.nodes] for region in found]


def test_what_lies_between_two_gemms_is_one_region() -> None:
    def f(x, w, v, table):
        q, value = stored(torch.relu(x @ w) * 2 + x, table)
        return q, value @ v

    _, found = regions_of(f, X, torch.zeros(8, 8), torch.zeros(8, 3), TABLE)
    assert found == [["relu", "mul", "add", "quantize", "dequantize"]]


def test_a_path_through_a_gemm_keeps_two_regions_apart() -> None:
    """One kernel would have to wait in its middle for the GEMM that reads its first half."""

    def f(x, w, table):
        _, value = stored(torch.relu(x), table)
        return stored(value + value @ w, table, 1, "1-5-2")

    gm, found = regions_of(f, X, torch.zeros(8, 8), TABLE)
    assert len(found) == 2
    assert found[0][:2] == ["relu", "quantize"]
    assert "add" in found[1]
    # The second reads one byte again instead of the four that the GEMM wants.
    decodes = {n.name for n in gm.graph.find_nodes(op="call_function", target=symbolic.DEQUANTIZE)}
    assert decodes & set(found[0])
    assert decodes & set(found[1])


def test_a_result_of_a_reduction_that_no_kernel_makes_is_read_from_memory() -> None:
    """A layer norm of one channel: its mean was taken for a result of the kernel itself."""

    def f(x, table):
        var, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
        return stored((x - mean) * (var + 1e-5).rsqrt(), table)

    _, (found,) = regions_of(f, torch.zeros(4, 1), TABLE)
    assert "quantize" in found
    assert not [name for name in found if name.startswith(("var_mean", "getitem"))]


def test_a_rows_one_value_is_not_rounded_beside_the_row() -> None:
    """A kernel of rows would count it once for each column."""

    def f(x, table):
        mean = x.mean(-1, keepdim=True)
        return *stored(mean, table), *stored(x - mean, table, 1, "1-5-2")

    _, found = regions_of(f, X, TABLE)
    assert [[name for name in region if name.startswith("quantize")] for region in found] in (
        [["quantize"], ["quantize_1"]],
        [["quantize_1"], ["quantize"]],
    )


def test_a_reduction_over_rows_joins_what_it_reads_and_what_reads_it() -> None:
    def f(x, weight, table):
        _, value = stored(x, table)
        return stored(torch.nn.functional.layer_norm(value, (8,), weight), table, 1, "1-5-2")

    _, (found,) = regions_of(f, X, torch.ones(8), TABLE)
    assert {"var_mean", "getitem", "rsqrt", "quantize_1"} <= set(found)


@pytest.mark.parametrize("over", [(0,), (0, 1)])
def test_other_reductions_stay_outside(over) -> None:
    _, (found,) = regions_of(lambda x, table: (*stored(x * 2, table), x.sum(over)), X, TABLE)
    assert found == ["mul", "quantize", "dequantize"]


def test_a_row_is_not_taken_for_a_column_of_the_same_length() -> None:
    """Without ``keepdim`` the sums of a square broadcast along the columns: element c belongs to column c."""

    def f(x, table):
        return stored(x + x.sum(-1), table)

    _, (found,) = regions_of(f, torch.zeros(8, 8), TABLE)
    assert "sum_1" not in found


def test_what_has_no_codec_is_left_to_inductor() -> None:
    _, found = regions_of(lambda x: torch.softmax(torch.relu(x) * 2, -1), X)
    assert found == []


def test_only_what_is_read_outside_is_written() -> None:
    gm = traced(lambda x, table: stored(torch.relu(x), table)[0], X, TABLE)
    (region,) = in_order(gm.graph, find_regions(gm.graph))
    assert [n.name for n in outputs(region)] == ["quantize"]


def random_graph(seed: int) -> Graph:
    """Sums, casts and GEMMs that read any of the nodes before them."""
    pick, graph = random.Random(seed), Graph()
    val, table = torch.zeros(8, 8, device="meta"), torch.zeros(2, 10, dtype=torch.int32, device="meta")
    given, rows = graph.placeholder("x"), graph.placeholder("table")
    given.meta["val"], rows.meta["val"] = val, table
    nodes: list[Node] = [given]
    for _ in range(30):
        a, b = pick.choice(nodes[-6:]), pick.choice(nodes)
        if pick.random() < 0.25:
            node = graph.call_function(torch.ops.aten.mm.default, (a, b))
        elif pick.random() < 0.4:
            q = graph.call_function(symbolic.QUANTIZE, (a, rows, 0, "1-4-3+4", "packed"))
            q.meta["val"] = val.to(torch.uint8)
            node = graph.call_function(symbolic.DEQUANTIZE, (q, rows, -1, "1-4-3+4", "packed", torch.float32))
        else:
            node = graph.call_function(torch.ops.aten.add.Tensor, (a, b))
        node.meta["val"] = val
        nodes.append(node)
    graph.output((*nodes[-3:],))
    return graph


@pytest.mark.parametrize("seed", range(30))
def test_regions_can_run_in_their_order(seed: int) -> None:
    """Contract each region to a point: every edge must lead forward."""
    graph = random_graph(seed)
    regions = in_order(graph, find_regions(graph))
    graph.lint()
    home = {n: region for region in regions for n in region.nodes}
    place: dict[object, int] = {}
    for node in graph.nodes:
        place.setdefault(home.get(node, node), len(place))
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if home.get(source, source) is not home.get(node, node):
                assert place[home.get(source, source)] < place[home.get(node, node)]
    assert [r for r in place if r in regions] == regions
