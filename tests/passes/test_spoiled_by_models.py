"""Values that 8 bits would spoil because of how a model's own code reads them: its backward, and differences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Apply, Parts, Residual
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers import compiled, eager_backend, gradients


class OwnBackward(torch.autograd.Function):
    """Saves its operand; its backward computes a factor of the gradient from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if ctx.kind == "clamped":  # of a gradient: what is read is the product, and its error is the factor's
            return (grad * (3 * x)).clamp(-10, 10), None
        return grad * {"sine": torch.sin(30 * x), "square": 3 * x * x, "step": torch.round(10 * x + 2)}[ctx.kind], None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("kind", "reader"), [("sine", "sin"), ("step", "round"), ("square", ""), ("clamped", "")])
def test_what_a_backward_of_the_models_own_computes_from_a_value_counts_as_its_reader(
    kind: str, reader: str, relu: bool
) -> None:
    own = Apply(lambda x: OwnBackward.apply(x.relu() if relu else x, kind))
    model, x = nn.Sequential(nn.Linear(16, 32), own, nn.Linear(32, 8)), torch.randn(64, 16)
    ours = compiled(model, backend := eager_backend("fp8", low_ratio=1.0))
    ours(x).square().sum().backward()
    (plan,) = backend.plans
    read = next(site for site in plan.sites if site.tensor == ("relu" if relu else "addmm"))
    if reader:
        assert f"(aten.{reader}.default)" in read.why
        assert read.format == "fp32"
        assert plan.notes[0].startswith(f"aten.{reader}.default: its backward reads saved values in their own dtype")
    else:
        assert not any("no measurement" in site.why for site in plan.sites)
        assert plan.notes == ()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "cosine": lambda h, taught: 1 - F.cosine_similarity(h, taught).mean(),
    "normalized": lambda h, taught: 2 - 2 * (F.normalize(h) * F.normalize(taught)).sum(-1).mean(),
    "logits": lambda h, taught: F.binary_cross_entropy_with_logits(h, taught.sigmoid()),
}


class Nearby(nn.Module):
    """A loss of features that another layer reads too: of their difference from a teacher's, or of both directions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.enter, self.leave = kind, nn.Linear(16, 64), nn.Linear(64, 8)
        self.teacher = copy.deepcopy(self.enter).requires_grad_(False)
        with torch.no_grad():
            self.teacher.bias += 0.02 * torch.randn(64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        with torch.no_grad():
            taught = self.teacher(x)
        other = self.leave(F.gelu(h)).square().mean() / 1000
        if self.kind in LOSSES:
            return LOSSES[self.kind](h, taught) + other
        h = h.view(16, 4, 64)
        return (F.silu(h.flip(1)) + F.silu(h)).square().mean() + other


@pytest.mark.parametrize("budget", [None, "92%"])
@pytest.mark.parametrize("kind", [*LOSSES, "flip"])
def test_a_difference_of_nearly_equal_values_has_the_error_of_16_bits(kind: str, budget: str | None) -> None:
    model, x = Nearby(kind), torch.randn(64, 16)
    model(x).backward()
    wanted = gradients(model)
    errors = {}
    for recipe in ("bf16", "fp8"):
        model.zero_grad()
        torch.compiler.reset()
        budgets = {"peak_budget": budget} if budget and recipe == "fp8" else {}
        compiled(model, eager_backend(recipe, low_ratio=None, **budgets))(x).backward()
        errors[recipe] = {
            name: float((g - wanted[name]).norm() / wanted[name].norm()) for name, g in gradients(model).items()
        }
    for name, error in errors["fp8"].items():
        assert error < errors["bf16"][name] + 0.05, name


@pytest.mark.parametrize("budget", [None, "92%"])
def test_an_input_that_the_loss_reads_too_keeps_its_own_dtype(budget: str | None) -> None:
    """An autoencoder whose output is its input, nearly."""
    layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    model, x = Parts(lambda m, x: F.mse_loss(x + 0.01 * m.layers(x), x), layers=layers), torch.randn(64, 16)
    model(x).backward()
    wanted = gradients(model)
    model.zero_grad()
    budgets = {} if budget is None else {"peak_budget": budget}
    compiled(model, backend := eager_backend("fp8", low_ratio=None, **budgets))(x).backward()
    for name, g in gradients(model).items():
        assert float((g - wanted[name]).norm() / wanted[name].norm()) < 0.05, name
    (plan,) = backend.plans
    assert next(site for site in plan.sites if site.tensor == "x").format == "fp32"


def test_a_layer_that_the_loss_only_passes_through_keeps_its_8_bits() -> None:
    """The last sum of a residual stream leads to the loss; its backward reads neither summand."""
    layers = (nn.Linear(16, 64), nn.GELU(), Residual(nn.Linear(64, 64)))
    stream = nn.Sequential(*layers, Apply(lambda x: x.square().mean()))
    compiled(stream, backend := eager_backend("fp8", low_ratio=1.0))(torch.randn(64, 16)).backward()
    (plan,) = backend.plans
    assert not any("a loss's backward reads it" in site.why for site in plan.sites)
    assert next(site for site in plan.sites if site.tensor == "addmm").format == "e4m3fn"


@pytest.mark.parametrize("budget", [None, "95%"])
def test_differences_of_parts_of_one_value_are_not_computed_from_its_8_bit_copy(budget: str | None) -> None:
    """A layer reads the differences of adjacent frames' features, another the features."""
    enter, of_deltas, leave = nn.Linear(16, 64), nn.Linear(64, 8), nn.Linear(64, 8)

    def both(m: Any, h: Tensor) -> Tensor:
        return m.of_deltas(F.gelu((h[:, 1:] - h[:, :-1]) * 30)).square().mean() + m.leave(F.gelu(h)).mean()

    model = nn.Sequential(enter, Parts(both, of_deltas=of_deltas, leave=leave))
    x = torch.randn(8, 1, 16) + 0.02 * torch.randn(8, 16, 16).cumsum(1)
    model(x).backward()
    wanted = gradients(model)["1.of_deltas.weight"]
    model.zero_grad()
    budgets = {} if budget is None else {"peak_budget": budget}
    compiled(model, eager_backend("fp8", low_ratio=None, **budgets))(x).backward()
    assert float((gradients(model)["1.of_deltas.weight"] - wanted).norm() / wanted.norm()) < 0.3
