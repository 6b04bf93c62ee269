"""What was widened, shown otherwise and narrowed again is read as it was; nothing that rounds is left out."""

from __future__ import annotations

import pytest
import torch
from one_pass import run_pass
from processors import plan_on
from test_conversions import BF16, CONVERT, F32, _Graph, _Work
from torch import nn
from torch.fx import Node

from fxprec.ir import symbolic
from fxprec.passes import narrow_gemms
from fxprec.passes.drop_round_trips import DropRoundTrips

aten = torch.ops.aten
F16 = torch.float16


@pytest.fixture
def graph() -> _Graph:
    return _Graph()


def dropped(graph: _Graph, *results: Node) -> list[Node]:
    """Run the pass; the results must stay as they were, bit for bit."""
    graph.output(results)
    args = [torch.randn(n.meta["val"].shape).to(n.meta["val"].dtype) for n in graph.find_nodes(op="placeholder")]
    wanted = graph.run(*args)
    DropRoundTrips().apply(_Work(graph))
    graph.lint()
    graph.eliminate_dead_code()
    for a, b in zip(graph.run(*args), wanted, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a, b)
    return list(graph.output_node().args[0])


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_there_and_back_through_views_is_the_view_of_what_it_was(graph: _Graph, dtype: torch.dtype) -> None:
    x = graph.give(torch.randn(4, 6, dtype=dtype))
    wide = graph.add(CONVERT, x, F32)
    shown = graph.add(aten.permute.default, graph.add(aten.view.default, wide, [2, 2, 6]), [1, 0, 2])
    (result,) = dropped(graph, graph.add(CONVERT, shown, dtype))
    assert graph.count(CONVERT) == 0
    assert (result.target, result.meta["val"].dtype) == (aten.permute.default, dtype)


def test_who_reads_it_wide_still_does(graph: _Graph) -> None:
    x = graph.give(torch.randn(4, 6, dtype=BF16))
    wide = graph.add(CONVERT, x, F32)
    narrow, _ = dropped(graph, graph.add(CONVERT, wide, BF16), graph.add(aten.sin.default, wide))
    assert narrow is x
    assert graph.count(CONVERT) == 1


@pytest.mark.parametrize(
    ("first", "then"),
    [((BF16, F32), F16), ((F16, F32), BF16), ((F32, BF16), F32), ((BF16, F16), BF16)],
    ids=["bf16 to fp16", "fp16 to bf16", "rounded and back", "through fp16"],
)
def test_what_rounds_stays(graph: _Graph, first: tuple[torch.dtype, torch.dtype], then: torch.dtype) -> None:
    x = graph.give(torch.randn(4, 6, dtype=first[0]))
    dropped(graph, graph.add(CONVERT, graph.add(CONVERT, x, first[1]), then))
    assert graph.count(CONVERT) == 2


def test_arithmetic_between_is_no_view(graph: _Graph) -> None:
    x = graph.give(torch.randn(4, 6, dtype=BF16))
    dropped(graph, graph.add(CONVERT, graph.add(aten.sin.default, graph.add(CONVERT, x, F32)), BF16))
    assert graph.count(CONVERT) == 2


def test_between_two_gemms_nothing_is_converted_or_stored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bf16 GEMM's result is the stored copy, and the next GEMM's operand."""
    plan_on(monkeypatch, "avx512+bf16+fp16")
    monkeypatch.setattr(narrow_gemms, "SMALL", 0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Unflatten(1, (4, 4)), nn.Flatten(), nn.Linear(16, 4))
    ran = run_pass("drop-round-trips", model, torch.randn(32, 8), recipe="bf16", low_ratio=None)
    first, second = (n for n in ran.graph.nodes if n.target is aten.addmm.default)
    operand = second.args[1]
    while operand.target is aten.view.default:
        operand = operand.args[0]
    assert operand is first
    copied = [cast.x for _, cast in symbolic.Quantize.among(ran.nodes(symbolic.QUANTIZE))]
    assert [n.op for n in copied] == ["placeholder"], "the input alone"
