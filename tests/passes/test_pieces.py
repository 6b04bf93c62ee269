"""What is computed in pieces, joined and then rounded is rounded in pieces: the gradient of a gated layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemm_helpers import table_of
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import fxprec.runtime.gemm.ops
import fxprec.runtime.reference_ops  # noqa: F401
from fxprec.ir.symbolic import KEEP_NONFINITE, QUANTIZE, Count, Quantize
from fxprec.kernels.counts import Totals
from fxprec.kernels.layout import SideBySide
from fxprec.numerics.stats import finish
from fxprec.passes.lowering.pieces import cast_in_pieces
from fxprec.passes.lowering.rows import WatchedRows
from fxprec.passes.lowering.totals import add_up

aten = torch.ops.aten
TABLE = table_of((3, "e5m2_sat"), (0, "e4m3fn"))
GATE, UP = torch.randn(2, 5, 6), torch.randn(2, 5, 4)
GATE[0, 1, 2], GATE[1, 0, 0], UP[0, 0, 0] = torch.inf, -torch.nan, 1e-30


def joined(case: str = "") -> tuple[GraphModule, list[Node]]:
    """Compute two pieces, join them, round them and count what is lost; ``case`` is what is different."""
    graph = Graph()
    gate, up, table = (graph.placeholder(name) for name in ("gate", "up", "table"))
    call = graph.call_function
    pieces = [
        gate if case == "a piece in memory" else call(aten.mul.Tensor, (gate, gate)),
        call(aten.neg.default, (up,)),
    ]
    if case == "another dimension":
        pieces = [call(aten.permute.default, (piece, [0, 2, 1])) for piece in pieces]
    cat = call(aten.cat.default, (pieces, 1 if case == "another dimension" else -1))
    x = cat if case in ("unshaped", "another dimension") else call(aten.view.default, (cat, [10, 10]))
    q = call(QUANTIZE, (x, table, 0, "e5m2_sat", "native"))
    count = call(Count.target, (x, table, 0, "e5m2_sat"))
    results = [q] if case == "rounded alone" else [call(KEEP_NONFINITE, (q, x))]
    if case == "a bias":
        results.append(call(aten.sum.dim_IntList, (x, [0])))
    if case == "codes read twice":
        results.append(call(aten.view.dtype, (q, torch.uint8)))
    graph.output((*results, count))
    gm = GraphModule(torch.nn.Module(), graph)
    FakeTensorProp(gm).propagate(GATE, UP, TABLE)
    return gm, [count]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x


@pytest.mark.parametrize("case", ["", "unshaped", "rounded alone"])
def test_codes_and_counts_are_those_of_the_whole(case: str) -> None:
    wanted = joined(case)[0](GATE, UP, TABLE)
    gm, counts = joined(case)
    pieces = cast_in_pieces(gm.graph, counts)
    assert [len(found) for found in pieces.values()] == [2]
    output = gm.graph.output_node()
    codes = output.args[0][:-1]
    output.args = (codes,)
    _, results = add_up(gm.graph, counts, WatchedRows(scaled=frozenset({0})), pieces)
    output.args = ((*codes, *results),)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    assert all("val" not in cat.meta for cat in gm.graph.find_nodes(op="call_function", target=aten.cat.default)), (
        "counts"
    )
    assert len(SideBySide.nodes(gm.graph)) == 1
    found = gm(GATE, UP, TABLE)
    for got, right in zip(found[:-1], wanted[:-1], strict=True):
        assert got.dtype == right.dtype
        assert torch.equal(bits(got), bits(right))
    lost = slice(0, 4)  # no moments are measured
    torch.testing.assert_close(found[-1][lost], wanted[-1][lost], rtol=0, atol=0, equal_nan=True)
    assert found[-1][0] > 0


@pytest.mark.parametrize("case", ["a piece in memory", "another dimension", "a bias", "codes read twice"])
def test_what_is_wanted_whole_stays_whole(case: str) -> None:
    gm, counts = joined(case)
    before = [(cast.x, cast.row) for _, cast in Quantize.among(Quantize.nodes(gm.graph))]
    assert cast_in_pieces(gm.graph, counts) == {}
    assert [(cast.x, cast.row) for _, cast in Quantize.among(Quantize.nodes(gm.graph))] == before
    assert Count.of(counts[0]).x is before[0][0]


@pytest.mark.parametrize(("length", "short"), [(100, True), ((1 << 15) - 1, True), (1 << 15, False)])
def test_short_parts_are_those_whose_counts_share_32_bits(length: int, short: bool) -> None:
    gm, totals = added_up((4, length))
    assert [Totals.of(node).short for node in totals] == [[short]]
    x = torch.full((4, length), torch.inf)
    x[1], x[2, ::2] = 1e-30, 0
    (found,) = finish(gm(x, TABLE)[0].view(1, -1))
    assert (found.overflow_ratio, found.underflow_ratio) == ((3 * length - (length + 1) // 2) / (4 * length), 0.25)


def test_what_may_grow_has_no_parts() -> None:
    """The two counts of a short part share 32 bits: one of a size that may grow would spill into the other."""
    assert added_up((4, 100), "symbolic")[1] == []


def added_up(shape: tuple[int, int], mode: str = "fake") -> tuple[GraphModule, list[Node]]:
    """Return a graph that counts a tensor of such a size, and its nodes that add up parts."""
    count: Any = Count.target
    gm = make_fx(lambda x, table: count(x, table, 0, "e5m2_sat"), tracing_mode=mode)(torch.ones(shape), TABLE)
    counts = list(Count.nodes(gm.graph))
    gm.graph.output_node().args = ((),)
    _, found = add_up(gm.graph, counts, WatchedRows(), {})
    gm.graph.output_node().args = (tuple(found),)
    gm.recompile()
    return gm, Totals.nodes(gm.graph)
