"""What waits in a step lies as small as it can: parts of concats, sums of gradients; a convolution's gradients are two calls."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend_helpers import eager_backend
from one_pass import run_pass
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory.measure import peak_bytes
from benchmarks.memory.pairs import loops_left_out
from fxprec import Backend, Config
from fxprec.ir.symbolic import InMemory
from fxprec.passes import choose_crossings, shorten_lives
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.casts import two_gradients
from fxprec.passes.casts.two_gradients import split_gradients
from fxprec.passes.crossings.best_of import BestOf
from fxprec.passes.crossings.moments import Fit

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


def train(model: nn.Module, run: Any, images: int = IMAGES) -> None:
    model.zero_grad()
    x = torch.randn(images, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    run(x).square().mean().backward()


def gradients(model: nn.Module, run: Any) -> Tensor:
    train(model, run)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compiled(model: nn.Module, backend: Backend | None = None, **options: Any) -> Any:
    torch._dynamo.reset()
    settings = {"recipe": "fp8", "low_ratio": None, "peak_budget": "100%", **options}
    return torch.compile(model, backend=backend or eager_backend("native", **settings))


@pytest.fixture
def laid(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Shapes and dtypes of what lies apart, and of what is joined, of each joint graph."""
    found: list[dict[str, Any]] = []
    rewrite = shorten_lives.give_own_buffers

    def watch(work: Any) -> None:
        rewrite(work)
        cats = work.joint.graph.find_nodes(op="call_function", target=aten.cat.default)
        nodes = {"apart": InMemory.nodes(work.joint.graph), "joined": cats}
        vals = {name: map(tensor_of, found) for name, found in nodes.items()}
        found.append({name: [(tuple(x.shape), x.dtype) for x in xs] for name, xs in vals.items()})

    monkeypatch.setattr(shorten_lives, "give_own_buffers", watch)
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


@pytest.mark.cpu_dependent
def test_bits_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Skips()
    found = gradients(model, compiled(model, recipe="bf16"))
    monkeypatch.setattr(shorten_lives, "give_own_buffers", lambda work: None)
    monkeypatch.setattr(shorten_lives, "split_gradients", lambda graph: None)
    assert torch.equal(found, gradients(model, compiled(model, recipe="bf16")))


@pytest.mark.cpu_dependent
@pytest.mark.inductor
def test_the_allocator_sees_a_part_wait_and_not_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Skips()
    images = 16  # together larger than what a convolution without bf16 instructions converts at once
    with_parts = peak_of(model, images)
    monkeypatch.setattr(shorten_lives, "give_own_buffers", lambda work: None)
    part = 2 * images * WIDTH * SIDE * SIDE
    assert with_parts < peak_of(model, images) - part


def peak_of(model: nn.Module, images: int = IMAGES) -> int:
    with loops_left_out():
        run = compiled(model, Backend(Config(recipe="fp8", peak_budget="100%")))
        train(model, run, images)
        return min(peak_of_step(lambda: train(model, run, images)) for _ in range(2))


def peak_of_step(step: Callable[[], object]) -> int:
    gc.collect()  # what other tests left is not freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step()
    return peak_bytes(profiled)


class Rounded(torch.autograd.Function):
    """The identity; its gradient has 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -(-gradient.bfloat16()).float()  # of two conversions in a row torch 2.11 makes none


class Residual(nn.Module):
    """Three blocks with a skip: gradients of what they return wait for the block's own."""

    def __init__(self, rounds: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 3, padding=1)
        widths = (WIDTH, 2 * WIDTH) * 3
        self.blocks = nn.ModuleList(nn.Conv2d(w, 3 * WIDTH - w, 3, padding=1) for w in widths)
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for i in range(0, 6, 2):
            x = Rounded.apply(x) if self.rounds and i else x
            x = F.relu(x + self.blocks[i + 1](F.relu(self.blocks[i](x))))
        return self.last(x)


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_sums_of_gradients_that_wait_lie_in_16_bits(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[torch.Size, torch.dtype]] = []
    narrow = shorten_lives.narrow_sums

    def watch(work: Any) -> None:
        narrow(work)
        found.extend((tensor_of(n).shape, tensor_of(n).dtype) for n in InMemory.nodes(work.joint.graph))

    monkeypatch.setattr(shorten_lives, "narrow_sums", watch)
    model = Residual()
    gradients(model, compiled(model, recipe=recipe))
    assert found == [((IMAGES, WIDTH, SIDE, SIDE), torch.bfloat16)] * 3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo's own
def test_a_sum_of_gradients_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, rounding = Residual(), Residual(rounds=True)
    rounding.load_state_dict(model.state_dict())
    found = gradients(model, compiled(model, recipe="bf16"))
    monkeypatch.setattr(shorten_lives, "narrow_sums", lambda work: None)
    assert torch.equal(found, gradients(rounding, compiled(rounding, recipe="bf16")))
    assert not torch.equal(found, gradients(model, compiled(model, recipe="bf16")))


def test_a_sum_waits_and_not_its_addends(monkeypatch: pytest.MonkeyPatch) -> None:
    def most_of_backward() -> int:
        fits: list[Fit] = []
        monkeypatch.setattr(choose_crossings, "_remark", lambda needs, fit: fits.append(fit) or "")
        gradients(model, compiled(model))
        timeline = fits[-1].replay.timeline
        return max(timeline.live[timeline.split :])

    monkeypatch.setattr(BestOf, "unchanged", lambda *_: None)  # a choice whose peak lies elsewhere
    model = Residual()
    narrow = most_of_backward()
    monkeypatch.setattr(shorten_lives, "narrow_sums", lambda work: None)
    assert narrow <= most_of_backward() - 2 * IMAGES * WIDTH * SIDE * SIDE


class Fanned(nn.Module):
    """A layer whose result 40 products read: its gradient is a chain of 39 sums, each waiting for a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weights = nn.Linear(8, 8), nn.Parameter(torch.ones(40, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return sum((torch.sin(x @ weight) for weight in self.weights.unbind()), x)


def test_a_long_chain_of_sums_needs_no_deep_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, limit = shorten_lives.narrow_sums, sys.getrecursionlimit()

    def watch(work: Any) -> None:
        sys.setrecursionlimit(len(inspect.stack(0)) + 30)
        try:
            narrow(work)
        finally:
            sys.setrecursionlimit(limit)

    monkeypatch.setattr(shorten_lives, "narrow_sums", watch)
    options = {"recipe": "bf16", "low_ratio": None, "peak_budget": "100%"}
    found = run_pass("shorten-lives", Fanned(), torch.randn(16, 8), **options)
    _, sums = found.halves(torch.ops.aten.add.Tensor)
    assert sums >= 39


class Narrowing(nn.Sequential):
    """Convolutions of large images, whose activations wait while the gradients of large weights are made."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after, stride in ((3, 16, 1), *[(16, 16, 1)] * 5, (16, 128, 8), (128, 128, 1), (128, 128, 1)):
            layers += [nn.Conv2d(before, after, 3, stride, 1), nn.ReLU()]
        super().__init__(*layers)


@pytest.mark.cpu_dependent
@pytest.mark.inductor
def test_a_gradient_larger_than_what_it_is_made_of_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Narrowing()
    late = peak_of(model)
    monkeypatch.setattr(two_gradients, "_shape_of", lambda weight, gradient: weight)
    copy = 2 * 128 * 128 * 9  # of the weight: the gradient itself is there at the end anyway
    assert late < peak_of(model) - copy / 3


@pytest.mark.inductor
def test_a_parameter_that_lends_its_shape_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1))
    lent = gradients(model, compiled(model, Backend(Config(recipe="bf16", peak_budget="100%"))))
    monkeypatch.setattr(two_gradients, "_shape_of", lambda weight, gradient: weight)
    assert torch.equal(lent, gradients(model, compiled(model, Backend(Config(recipe="bf16", peak_budget="100%")))))


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
    split_gradients(gm.graph)
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
    split_gradients(gm.graph)
    assert str(gm.graph) == before


@pytest.mark.parametrize("batch", [0, 2])
def test_a_convolution_of_no_channels_keeps_its_one_call(batch: int) -> None:
    """A transposed convolution of a weight without elements is an error of ATen's."""
    layer = nn.Conv2d(2, 12, 3, bias=False)
    layer.weight = nn.Parameter(torch.randn(12, 0, 3, 3))
    x = torch.randn(batch, 0, 8, 8, requires_grad=True)
    torch.compile(layer, backend=eager_backend("packed", recipe="bf16"))(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert (x.grad.shape, layer.weight.grad.shape) == (x.shape, layer.weight.shape)
