"""What is made again in backward stands before its first reader there."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from models import Apply, Parts
from torch import nn
from torch.nn import functional as F

from fxprec.passes.make_again import MADE_AGAIN
from tests.helpers import compiled, eager_backend

pytestmark = pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")


def test_a_value_made_again_from_another_one_comes_after_it():
    """A root mean square norm in two steps, of which backward reads the second first."""
    weight = nn.Parameter(torch.linspace(0.5, 1.5, 64))
    norm = Parts(lambda m, x: m.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)), weight=weight)
    model, x = nn.Sequential(nn.Linear(64, 64), norm, nn.Linear(64, 64)), torch.randn(32, 64)
    step = compiled(model, backend := eager_backend("fp8", low_ratio=1.0))
    step(x).square().sum().backward()
    assert "2 tensors are recomputed in backward from the stored copy of their input" in backend.plans[0].notes
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for got, p in zip(found, model.parameters(), strict=True):
        assert F.cosine_similarity(got.flatten(), p.grad.flatten(), 0) > 0.995


class Gated(nn.Module):
    """A gate that is made by one layer together with what it gates (SwiGLU, GEGLU)."""

    def __init__(self, activation):
        super().__init__()
        self.activation, self.both, self.down = activation, nn.Linear(64, 256), nn.Linear(128, 64)

    def forward(self, x):
        gate, other = self.both(x).chunk(2, -1)
        return self.down(self.activation(gate) * other)


@pytest.mark.parametrize(
    ("activation", "is_made_again"),
    [(nn.SiLU(), True), (nn.GELU(), True), (nn.Sigmoid(), True), (nn.Tanh(), True), (nn.Softsign(), False)],
    ids=["silu", "gelu", "sigmoid", "tanh", "softsign"],
)
def test_an_activation_is_made_again_from_a_piece_of_what_is_stored(activation, is_made_again: bool):
    """Saturating ones, too, whose result would be stored in 16 bits: the piece is stored for the other factor."""
    model, x = Gated(activation), torch.randn(32, 64)
    step = compiled(model, backend := eager_backend("fp8", low_ratio=1.0))
    step(x).square().sum().backward()
    (site,) = [s for s in backend.plans[0].sites if s.module == "activation" and s.kind == "output"]
    assert (site.why == MADE_AGAIN) == is_made_again
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for got, p in zip(found, model.parameters(), strict=True):
        assert F.cosine_similarity(got.flatten(), p.grad.flatten(), 0) > 0.995


@pytest.mark.parametrize(
    ("function", "is_made_again"), [(lambda y: y * y, False), (lambda y: y + y, True)], ids=["y * y", "y + y"]
)
def test_a_square_is_stored_and_not_made_again(function, is_made_again: bool):
    """A square has twice the relative error of what is squared: it is no affine image."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), Apply(function), nn.Linear(256, 64))
    x = torch.randn(512, 64)
    step = compiled(model, backend := eager_backend("fp8", low_ratio=1.0))
    step(x).sum().backward()
    assert (MADE_AGAIN in [s.why for s in backend.plans[0].sites]) == is_made_again
    found = model[-1].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    wanted = model[-1].weight.grad
    assert float((found - wanted).norm() / wanted.norm()) < 0.0045


WRITTEN_OUT = {
    "gelu": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "silu": (lambda x: x * torch.sigmoid(x), F.silu),
}


@pytest.mark.parametrize("is_gate", [False, True], ids=["alone", "gate"])
@pytest.mark.parametrize("name", list(WRITTEN_OUT))
def test_an_activation_that_a_model_writes_out_saves_no_more_than_torchs_and_has_its_gradients(name, is_gate: bool):
    found = []
    for function in WRITTEN_OUT[name]:
        torch.manual_seed(0)
        activation = Apply(function)
        model = Gated(activation) if is_gate else nn.Sequential(nn.Linear(64, 512), activation, nn.Linear(512, 64))
        x, saved = torch.randn(256, 64), {}
        with torch.autograd.graph.saved_tensors_hooks(partial(_noted, saved), lambda t: t):
            result = compiled(model, eager_backend("fp8", low_ratio=1.0))(x)
        result.square().sum().backward()
        found.append((sum(saved.values()), [p.grad for p in model.parameters()]))
    (saved, gradients), (wanted, references) = found
    assert saved == wanted
    for gradient, reference in zip(gradients, references, strict=True):
        assert float((gradient - reference).norm() / reference.norm()) < (0.04 if is_gate else 1e-3)


def _noted(saved: dict[int, int], x: torch.Tensor) -> torch.Tensor:
    saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return x
