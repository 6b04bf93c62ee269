"""A kernel around a GEMM that does not compile on a GPU: said, and done without, at the cost of speed only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

sys.path.insert(0, str(Path(__file__).parents[1]))

from gemm_helpers import half_graph, table_of

import fxprec.runtime.gemm.reference_ops
import fxprec.runtime.reference_ops  # noqa: F401
from fxprec.config import Config
from fxprec.driver.lowering import Lowering
from fxprec.errors import FallbackError
from fxprec.ir.symbolic import InMemory
from fxprec.kernels.coded_gemms import GemmKernel, kernel_called
from fxprec.passes.lowering.lower import lower
from fxprec.passes.lowering.lowered import Lowered
from fxprec.passes.lowering.rows import WatchedRows
from fxprec.passes.notice import Notice

kernels_ahead = pytest.importorskip("fxprec.driver.kernels_ahead", reason="needs Triton")
TABLE = table_of((0, "e4m3fn"), (5, "e5m2_sat"), (-4, "1-5-2"))
ALL = ["gemm e5m2_sat x e4m3fn to 1-5-2", "quantize+transpose e4m3fn", "quantize+transpose e5m2_sat"]


def lowered_on_a_gpu(monkeypatch: pytest.MonkeyPatch, failing: set[str], tell: Any) -> GraphModule:
    """Lower as on an H100 where some kernels do not compile; return the graph that would be built."""
    built: list[GraphModule] = []

    def failing_kernels(graph: Graph, device: torch.device) -> dict[GemmKernel, str]:
        called = {kernel for node in graph.nodes if (kernel := kernel_called(node)) is not None}
        return {k: "it does not compile: PTXASError: no memory" for k in called if k.name in failing}

    def lower_half(gm: GraphModule, lowering: str, without: frozenset[str]) -> Lowered:
        return lower(gm, lowering, "cuda", WatchedRows(scaled=frozenset({1, 2})), without=without)

    monkeypatch.setattr(kernels_ahead, "failing_kernels", failing_kernels)
    lowering = Lowering(Config(recipe="hfp8", lowering="inductor"), torch.device("cuda"), tell)
    lowering.compile(half_graph(TABLE), lower_half, built.append)
    return built[0]


def names(gm: GraphModule) -> list[str]:
    return sorted({kernel.name for n in gm.graph.nodes if (kernel := kernel_called(n)) is not None})


@pytest.mark.parametrize(
    ("failing", "left"),
    [
        ([], ALL),
        (ALL[:1], ["gemm e5m2_sat x e4m3fn", *ALL[1:]]),
        ([ALL[0], "gemm e5m2_sat x e4m3fn"], ALL[1:]),
        (ALL[1:2], [ALL[0], ALL[2], "transpose"]),
        ([*ALL[1:], "transpose"], ALL[:1]),
        ([*ALL, "gemm e5m2_sat x e4m3fn", "transpose"], []),
    ],
    ids=["nothing", "encoding GEMM", "GEMM", "one cast", "both casts and transposition", "everything"],
)
def test_only_what_fails_goes_and_what_takes_its_place_is_tried_too(monkeypatch, failing, left) -> None:
    told: list[Notice] = []
    gm = lowered_on_a_gpu(monkeypatch, set(failing), told.append)
    assert names(gm) == sorted(left)
    assert sorted(n.site for n in told) == sorted(f"kernel {name}" for name in failing)
    for notice in told:
        assert notice.detail.startswith("it does not compile: PTXASError: no memory; Inductor decodes")
        assert "at the speed of high precision" in notice.detail


def test_without_any_of_them_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is left is ATen, and a buffer for scales, which a CPU runs too: the bits of the symbolic graph."""
    gm = lowered_on_a_gpu(monkeypatch, {*ALL, "gemm e5m2_sat x e4m3fn", "transpose"}, lambda notice: None)
    ours = {n.target for n in gm.graph.nodes if str(n.target).startswith("fxprec.")}
    assert ours <= {InMemory.target}, "no kernel of ours is left"
    g = torch.Generator().manual_seed(0)
    x, dy = torch.randn(64, 32, generator=g) * 200, torch.randn(64, 48, generator=g)
    wanted = half_graph(TABLE)(x, dy, TABLE)
    for a, b in zip(gm(x, dy, TABLE), wanted, strict=False):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.float(), b.float())


def test_under_strict_the_first_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(notice: Notice) -> None:
        raise FallbackError(f"{notice.site}: {notice.detail}")

    with pytest.raises(FallbackError, match=r"kernel quantize\+transpose e4m3fn: it does not compile: PTXASError"):
        lowered_on_a_gpu(monkeypatch, {ALL[1]}, refuse)
