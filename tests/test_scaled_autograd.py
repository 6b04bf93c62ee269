"""Gradient scaling under every way autograd is used around it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, eager_backend
from models import Apply
from scaled_models import TINY, data, grads, mlp
from torch import nn

import fxprec
from fxprec import GradScaling

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo does it
]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize(
    ("recipe", "storage"), [("fp16", "packed"), ("fp8", "simulate"), ("hfp8", "simulate"), ("fp16", "native")]
)
def test_a_bad_batch_reaches_the_parameter_gradients_and_not_the_scales(recipe: str, storage: str, bad: float) -> None:
    model = mlp()
    low_ratio = None if recipe == "fp16" else 1.0
    backend = eager_backend(recipe, storage=storage, low_ratio=low_ratio, grad_scaling=GradScaling(interval=1))
    function = compiled(model, backend)
    x, _ = data()
    for _ in range(3):
        function(x).square().mean().backward()
    model.zero_grad()
    before = [r["scale_exponent"] for r in backend.stats()]
    out = function(x)
    out.backward(torch.full_like(out, bad))
    assert all(not g.isfinite().all() for g in grads(model))
    model.zero_grad()
    for _ in range(2):
        function(x).square().mean().backward()
    assert all(g.isfinite().all() for g in grads(model))
    after = [r["scale_exponent"] for r in backend.stats()]
    assert all(abs(a - b) <= 1 for a, b in zip(after, before, strict=True))


def test_torch_grad_scaler_still_sees_inf() -> None:
    model = mlp()
    function = compiled(model, eager_backend("fp8", storage="simulate", low_ratio=1.0))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(model.state_dict())
    out = function(data()[0])
    scaler.scale((out * torch.tensor(math.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


class Several(nn.Module):
    """Outputs of every kind: differentiable, an index, detached, and an input that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.frozen = nn.Linear(16, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor):
        h = self.body(x).relu()
        out = self.head(h)
        return out, out.argmax(-1), self.frozen(h), h.detach()


FINE = fxprec.Recipe(hi="1-6-17", lo_forward="1-6-17", lo_backward="1-6-17", name="fine")
"""Exact to 2**-18, with a range that needs scales."""


def reference_of(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def same(model: nn.Module, reference: nn.Module, tolerance: float = 1e-3) -> None:
    """As close as a scale makes it that lets 1e-3 underflow: typical elements are 2**10 times the smallest number."""
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert float((a.grad - b.grad).norm()) <= tolerance * float(b.grad.norm()), name


STORAGES = pytest.mark.parametrize("storage", ["simulate", "packed"])


@STORAGES
def test_outputs_that_are_not_differentiable(storage: str) -> None:
    torch.manual_seed(0)
    model = Several()
    reference = reference_of(model)
    function = compiled(model, eager_backend(FINE, storage=storage))
    x, _ = data()
    for _ in range(3):
        for m, f in ((model, function), (reference, reference)):
            m.zero_grad()
            out, index, frozen, detached = f(x)
            assert not index.requires_grad
            assert not detached.requires_grad
            (out.sum() * TINY + (frozen.square().mean() * TINY)).backward()
        same(model, reference)
        assert model.frozen.weight.grad is None


@STORAGES
def test_retained_graphs_and_accumulated_gradients(storage: str) -> None:
    model = mlp()
    reference = reference_of(model)
    function = compiled(model, eager_backend(FINE, storage=storage))
    x, y = data()
    for _ in range(2):
        for m, f in ((model, function), (reference, reference)):
            m.zero_grad()
            losses = [F.mse_loss(f(part), target) for part, target in ((x, y), (x * 2, y * 3))]
            losses[0].backward(retain_graph=True)
            losses[0].backward()
            losses[1].backward()
    same(model, reference)


@STORAGES
def test_hooks_on_parameters_see_unscaled_gradients(storage: str) -> None:
    model = mlp()
    reference = reference_of(model)
    function = compiled(model, eager_backend(FINE, storage=storage))
    seen: dict[str, list[torch.Tensor]] = {"fxprec": [], "plain": []}
    for m, kind in ((model, "fxprec"), (reference, "plain")):
        m[0].weight.register_hook(lambda g, kind=kind: seen[kind].append(g.clone()))
        m[0].weight.register_hook(lambda g: g * 0.5)
    x, y = data()
    for _ in range(3):
        for m, f in ((model, function), (reference, reference)):
            m.zero_grad()
            F.mse_loss(f(x), y).mul(TINY).backward()
    same(model, reference)
    assert float((seen["fxprec"][-1] - seen["plain"][-1]).norm()) <= 1e-3 * float(seen["plain"][-1].norm())


def test_create_graph_is_refused_with_the_way_out() -> None:
    model = mlp()
    function = compiled(model, eager_backend("fp8", storage="packed"))
    x, y = data()
    loss = F.mse_loss(function(x), y)
    with pytest.raises(
        fxprec.DoubleBackwardError, match=r"create_graph=True.*no second derivatives; leave create_graph"
    ):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    F.mse_loss(function(x), y).backward()  # and the model still trains


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad * x.cos()).clamp(-2e-12, 2e-12)


def test_custom_autograd_functions_get_unscaled_gradients_where_they_are_not_linear() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Apply(Clipped.apply), nn.Linear(16, 4))
    reference = reference_of(model)
    backend = eager_backend(FINE, storage="simulate")
    function = compiled(model, backend)
    x, _ = data()
    for _ in range(3):
        for m, f in ((model, function), (reference, reference)):
            m.zero_grad()
            (f(x).square().mean() * TINY).backward()
    same(model, reference)
    assert any("clamp" in note for note in backend.plans[0].notes)
