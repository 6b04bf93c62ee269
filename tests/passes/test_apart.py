"""Skips into a concat, and the gradients of their parts, wait by themselves; two gradients of a convolution are two calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend_helpers import eager_backend
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory.measure import peak_bytes
from benchmarks.memory.pairs import loops_left_out
from fxprec import Backend, Config
from fxprec.ir.symbolic import InMemory
from fxprec.passes import fit_peak
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.casts.two_gradients import part_gradients

aten = torch.ops.aten
IMAGES, WIDTH, SIDE = 8, 16, 32


class Skips(nn.Module):
    """What the first convolution makes waits for the last, while two others run on an image of a quarter of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(2 * WIDTH, 4, 3, padding=1)
        self.inner = nn.Sequential(*(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()) * 2)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.first(x))
        inner = self.inner(F.max_pool2d(skip, 2))
        return self.last(torch.cat([skip, F.interpolate(inner, scale_factor=2)], 1))


def gradients(model: nn.Module, run: Any) -> Tensor:
    model.zero_grad()
    x = torch.randn(IMAGES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    run(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compiled(model: nn.Module, backend: Backend | None = None, **options: Any) -> Any:
    torch._dynamo.reset()
    settings = {"recipe": "fp8", "low_ratio": None, "peak_budget": "100%", **options}
    return torch.compile(model, backend=backend or eager_backend("native", **settings))


@pytest.fixture
def laid(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Shapes and dtypes of what lies apart, and of what is joined, of each joint graph."""
    found: list[dict[str, Any]] = []
    lay = fit_peak.lay_apart

    def watch(work: Any) -> None:
        lay(work)
        cats = work.joint.graph.find_nodes(op="call_function", target=aten.cat.default)
        nodes = {"apart": InMemory.nodes(work.joint.graph), "joined": cats}
        vals = {name: map(tensor_of, found) for name, found in nodes.items()}
        found.append({name: [(tuple(x.shape), x.dtype) for x in xs] for name, xs in vals.items()})

    monkeypatch.setattr(fit_peak, "lay_apart", watch)
    return found


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_a_skip_and_its_gradient_lie_apart_in_16_bits(recipe: str, laid: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    model = Skips()
    gradients(model, compiled(model, recipe=recipe))
    skip, joined = (IMAGES, WIDTH, SIDE, SIDE), (IMAGES, 2 * WIDTH, SIDE, SIDE)
    assert laid == [{"apart": [(skip, torch.bfloat16)] * 2, "joined": [(joined, torch.bfloat16)]}]


class Nested(Skips):
    """Two skips of different lengths into concats of which one reads the other; a slice beside a reader of the whole."""

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.first(x))
        short = self.inner[1](self.inner[0](skip))
        joined = torch.cat([short, F.relu(self.inner[2](short))], 1)
        whole = torch.cat([skip, joined], 1)
        return self.last(whole[:, WIDTH:]) + self.last(whole[:, : 2 * WIDTH]) + whole.mean()


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_concats_of_concats(recipe: str) -> None:
    torch.manual_seed(0)
    model = Nested()
    wanted = gradients(model, model)
    found = gradients(model, compiled(model, recipe=recipe))
    assert F.cosine_similarity(found, wanted, dim=0) > 0.999


class AtOnce(nn.Module):
    """Both parts are there when they are joined, and both gradients are read at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(2 * WIDTH, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.cat([x.relu(), x.sigmoid()], 1))


def test_what_waits_for_nothing_does_not(laid: list[dict[str, Any]]) -> None:
    model = AtOnce()
    gradients(model, compiled(model))
    assert laid == [{"apart": [], "joined": [((IMAGES, 2 * WIDTH, SIDE, SIDE), torch.bfloat16)]}]


def test_bits_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Skips()
    found = gradients(model, compiled(model, recipe="bf16"))
    monkeypatch.setattr(fit_peak, "lay_apart", lambda work: None)
    monkeypatch.setattr(fit_peak, "part_gradients", lambda graph: None)
    assert torch.equal(found, gradients(model, compiled(model, recipe="bf16")))


@pytest.mark.inductor
def test_the_allocator_sees_a_part_wait_and_not_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Skips()
    with_parts = peak_of(model)
    monkeypatch.setattr(fit_peak, "lay_apart", lambda work: None)
    part = 2 * IMAGES * WIDTH * SIDE * SIDE
    assert with_parts < peak_of(model) - part


def peak_of(model: nn.Module) -> int:
    with loops_left_out():
        run = compiled(model, Backend(Config(recipe="fp8", peak_budget="100%")))
        gradients(model, run)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            gradients(model, run)
    return peak_bytes(profiled)


WINDOWS = [
    # stride, padding, dilation, groups, height and width of the image, of the kernel
    ([1, 1], [1, 1], [1, 1], 1, (8, 8), (3, 3)),
    ([2, 2], [1, 1], [1, 1], 1, (8, 9), (3, 3)),
    ([3, 2], [0, 2], [1, 2], 1, (11, 12), (2, 3)),
    ([2, 1], [1, 0], [2, 1], 2, (10, 7), (3, 2)),
    ([2, 2], [0, 0], [1, 1], 1, (7, 8), (1, 1)),
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_two_gradients_are_those_of_one_call(window: Any, biased: bool) -> None:
    stride, padding, dilation, groups, image, kernel = window
    x, weight = torch.randn(2, 4, *image).double(), torch.randn(6, 4 // groups, *kernel).double()
    out = aten.convolution(x, weight, None, stride, padding, dilation, False, [0, 0], groups)

    def both(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        sizes = ([6], stride, padding, dilation, False, [0, 0], groups, [True, True, biased])
        found: tuple[Tensor | None, ...] = aten.convolution_backward(gradient, x, weight, *sizes)
        return found if biased else found[:2]

    gm: GraphModule = make_fx(both, tracing_mode="fake")(torch.randn_like(out), x, weight)
    gradient = torch.randn_like(out)
    wanted = gm(gradient, x, weight)
    part_gradients(gm.graph)
    gm.recompile()
    (masks,) = [n.args[-1] for n in gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)]
    assert masks == [False, True, biased]
    for found, expected in zip(gm(gradient, x, weight), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_a_gradient_that_is_not_asked_for_is_left() -> None:
    def one(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        sizes = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])
        found: Tensor = aten.convolution_backward(gradient, x, weight, *sizes)[0]
        return found

    x = torch.randn(2, 4, 8, 8)
    gm = make_fx(one, tracing_mode="fake")(x, x, torch.randn(4, 4, 3, 3))
    before = str(gm.graph)
    part_gradients(gm.graph)
    assert str(gm.graph) == before
