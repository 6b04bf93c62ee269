"""The gradient of a nearest upsampling is a sum of slices where each place was read as often; else it is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend_helpers import eager_backend
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec.passes import partition, shorten_lives
from fxprec.passes.casts.upsampled import sum_upsampled

aten = torch.ops.aten


def traced(whole: tuple[int, ...], places: Any, gradient: Tensor) -> GraphModule:
    """Trace the scatter of a gradient (2, 3, *made) into zeros (2, 3, *whole); ``places()`` are those it goes to."""

    def scatter(gradient: Tensor) -> Tensor:
        zeros = torch.full((2, 3, *whole), 0.0)
        found: Tensor = aten.index_put(zeros, [None, None, *places()], gradient, True)
        return found

    return make_fx(scatter, tracing_mode="fake")(gradient)


def is_left(gm: GraphModule) -> bool:
    before = len(gm.graph.find_nodes(op="call_function", target=aten.index_put.default))
    sum_upsampled(gm.graph)
    gm.recompile()
    return len(gm.graph.find_nodes(op="call_function", target=aten.index_put.default)) == before


def along(made: int, scale: float) -> Tensor:
    return (torch.arange(made) * scale).long()


@pytest.mark.parametrize("factors", [(2, 2), (1, 2), (3, 2), (2,), (2, 1, 2)])
def test_a_sum_of_slices_has_the_bits_of_a_scatter(factors: tuple[int, ...]) -> None:
    whole = tuple(range(4, 4 + len(factors)))
    made = [n * k for n, k in zip(whole, factors, strict=True)]

    def places() -> list[Tensor]:
        last = len(made) - 1
        return [
            along(n, 1 / k)[(..., *[None] * (last - i))] for i, (n, k) in enumerate(zip(made, factors, strict=True))
        ]

    gradient = torch.randn(2, 3, *made)
    gm = traced(whole, places, gradient)
    wanted = gm(gradient)
    assert not is_left(gm)
    assert torch.equal(gm(gradient), wanted)


@pytest.mark.parametrize(
    ("why", "whole", "places"),
    [
        ("another factor", (5, 8), lambda: [along(8, 5 / 8)[:, None], along(8, 1.0)]),
        ("another order", (4, 8), lambda: [along(8, 0.5).flip(0)[:, None], along(8, 1.0)]),
        ("places of pairs", (8, 8), lambda: [along(8, 1.0), along(8, 1.0)]),
        ("more slices than are worth it", (1, 8), lambda: [along(8, 0.01)[:, None], along(24, 1 / 3)]),
    ],
)
def test_any_other_scatter_is_left(why: str, whole: tuple[int, ...], places: Any) -> None:
    made = torch.broadcast_shapes(*(place.shape for place in places()))
    assert is_left(traced(whole, places, torch.randn(2, 3, *made))), why


def test_places_that_are_given_are_left() -> None:
    def scatter(gradient: Tensor, place: Tensor) -> Tensor:
        found: Tensor = aten.index_put(torch.full((2, 3, 4), 0.0), [None, None, place], gradient, True)
        return found

    assert is_left(make_fx(scatter, tracing_mode="fake")(torch.randn(2, 3, 8), along(8, 0.5)))


@pytest.mark.parametrize("budget", [None, "100%"])
def test_a_step_scatters_nothing(monkeypatch: pytest.MonkeyPatch, budget: str | None) -> None:
    def gradients() -> Tensor:
        torch._dynamo.reset()
        model.zero_grad()
        backend = eager_backend("native", recipe="bf16", low_ratio=None, peak_budget=budget)
        torch.compile(model, backend=backend)(x).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    scatters: list[int] = []

    def watch(graph: Graph) -> None:
        sum_upsampled(graph)
        scatters.append(len(graph.find_nodes(op="call_function", target=aten.index_put.default)))

    def put(sums: Callable[[Graph], None]) -> None:
        for module in (shorten_lives, partition):
            monkeypatch.setattr(module, "sum_upsampled", sums)

    torch.manual_seed(0)
    first, last = (nn.Conv2d(i, o, 3, padding=1) for i, o in ((3, 8), (8, 4)))
    model, x = nn.Sequential(first, nn.ReLU(), nn.Upsample(scale_factor=2), last), torch.randn(2, 3, 8, 8)
    put(watch)
    summed = gradients()
    assert set(scatters) == {0}
    put(lambda graph: None)
    assert torch.equal(summed, gradients())


def test_a_place_that_is_one_number_is_left() -> None:
    """``x[index]`` with an index of no dimension: the gradient has fewer dimensions than what it goes to."""

    def scatter(gradient: Tensor) -> Tensor:
        found: Tensor = aten.index_put(torch.full((4,), 0.0), [torch.tensor(2)], gradient, True)
        return found

    assert is_left(make_fx(scatter, tracing_mode="fake")(torch.randn(())))
