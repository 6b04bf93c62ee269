"""Errors of mean 0 in stored copies: gradients keep their mean wherever `unbiased` says so, and not where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Parts, Residual, SelfAttention
from torch import Tensor, nn

from fxprec import Backend, Config
from fxprec.passes.analysis.joint import JointGraph
from fxprec.passes.analysis.unbiased import Order, averaged_over

DRAWS = 300


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


def attention() -> nn.Module:
    """Norms, attention and a residual sum: 2 heads of 16 over 16 positions."""
    mixed = Residual(nn.LayerNorm(64), SelfAttention(64, 32, 64, causal=True))
    return nn.Sequential(nn.Linear(16, 64), mixed, nn.Linear(64, 8))


def draws(model: nn.Module, recipe: str, x: Tensor, count: int) -> tuple[dict[str, str], Tensor, Tensor]:
    """Return the block formats by tensor, the gradients with all kept in bf16, and ``count`` draws of them with stored copies."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    backend = Backend(Config(recipe=recipe, low_ratio=1.0, lowering="eager"))

    def gradients(run: Any) -> Tensor:
        model.zero_grad()
        run(x).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    high = Backend(Config(recipe="bf16", lowering="eager"))  # GEMMs in bf16 alone err by 0.4 % of a gradient
    exact = gradients(torch.compile(model, backend=high))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    found = torch.stack([gradients(compiled) for _ in range(count)])
    return {s.tensor: s.saved_as for s in backend.plans[0].sites if s.saved_as}, exact, found


def bias(exact: Tensor, found: Tensor) -> float:
    """Return the median of |mean - exact| in standard errors of the mean: 0.67 where there is no bias."""
    error = found.std(0) / len(found) ** 0.5
    random = error > 1e-6 * exact.abs()
    return float(((found.mean(0) - exact).abs() / error)[random].median())


@pytest.mark.parametrize(
    ("model", "shape", "stored"),
    [
        (attention, (4, 16, 16), {"addmm": "int4/32:bf16", "getitem_5": "int4/32:bf16", "addmm_1": "int8/32:bf16"}),
        (convolutions, (4, 3, 16, 16), {"convolution": "int4/32:bf16", "relu": "int4/32:bf16"}),
    ],
)
def test_gradients_of_norms_attention_and_convolutions_keep_their_mean(
    model: Callable[[], nn.Module], shape: tuple[int, ...], stored: dict[str, str]
) -> None:
    saved, exact, found = draws(model(), "fp8+int4/32:bf16", torch.randn(shape), DRAWS)
    assert stored.items() <= saved.items()
    assert 0.005 < (found - exact).norm(dim=1).mean() / exact.norm() < 0.12, "a draw is noisy"
    assert (found.mean(0) - exact).norm() < 0.01 * exact.norm(), "the mean of the draws is not"
    assert bias(exact, found) < 1.5


def test_where_it_says_no_gradients_are_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward reads the GELU's input through a formula that is not linear."""
    model, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(32, 16)
    saved, _, _ = draws(model, "fp8+int2/32:bf16", x, 1)
    assert "addmm" not in saved
    monkeypatch.setattr(Order, "biased_by", lambda *_: None)
    saved, exact, found = draws(model, "fp8+int2/32:bf16", x, 2 * DRAWS)
    assert saved["addmm"] == "int2/32:bf16"
    assert bias(exact, found) > 2


def test_a_norm_bears_few_bits_over_rows_that_are_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (averaged_over(4), averaged_over(2)) == (64, 1024)
    for width, bears in ((64, True), (32, False)):
        model = nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.Linear(width, 64))
        saved, _, _ = draws(model, "fp8+int4/32:bf16", torch.randn(64, 16), 1)
        assert ("addmm" in saved) == bears


def test_factors_of_a_product_bear_it() -> None:
    layers = {"first": nn.Linear(16, 64), "other": nn.Linear(16, 64), "last": nn.Linear(64, 8)}
    model = Parts(lambda m, x: m.last(m.first(x) * m.other(x)), **layers)
    saved, exact, found = draws(model, "fp8+int4/32:bf16", torch.randn(64, 16), 200)
    assert {"addmm", "addmm_1"} <= saved.keys()
    assert bias(exact, found) < 1.5


def test_what_no_table_knows_is_refused() -> None:
    graph = torch.fx.Graph()
    copy, gradient = graph.placeholder("copy"), graph.placeholder("tangents_1")
    product = graph.call_function(torch.ops.aten.mul.Tensor, (gradient, copy))
    strange = graph.call_function(torch.ops.aten.erfinv.default, (copy,))
    graph.output((product, strange))
    order = Order.of(JointGraph(graph, ()))
    assert order.biased_by([copy], 4) is strange
    assert order.biased_by([copy], 4, exempt=[strange]) is None
    assert Order(order.at, ()).biased_by([copy], 4) is strange
