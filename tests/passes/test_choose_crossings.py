"""Pass choose-crossings: our chooser in the place of torch's min-cut gives the same gradients and saves no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, eager_backend
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxprec.passes import pipeline
from tests.golden_model import Block


class Residual(nn.Module):
    """Dropout, a norm and a residual between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 16)
        self.norm = nn.LayerNorm(128)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.gelu(self.first(x)), 0.1)
        return self.last(F.silu(self.norm(self.inner(y) + y)))


class Written(nn.Module):
    """A buffer that backward reads and forward writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("mean", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.first(x) * self.mean.clone())
        self.mean.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        return self.last(y * self.mean.clone())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "block": (Block, (4, 3, 16, 16)),
    "residual": (Residual, (64, 64)),
    "written": (Written, (64, 64)),
}


def trained(name: str, recipe: str) -> tuple[list[Tensor], int, tuple[str, ...]]:
    """Return the gradients of two steps, the bytes that the plan saves, and its notes."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x, backend = make(), torch.randn(shape), eager_backend(recipe=recipe)
    run = compiled(model, backend)
    for _ in range(2):
        torch.manual_seed(1)
        run(x).square().mean().backward()
    (plan,) = backend.plans
    assert plan.saved_bytes is not None
    return [p.grad for p in model.parameters() if p.grad is not None], plan.saved_bytes.planned, plan.notes


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_torchs_min_cut_and_no_more_is_saved(
    name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, bytes_of_min_cut, _ = trained(name, recipe)
    monkeypatch.setattr(pipeline, "PIPELINE", pipeline.CHOSEN)
    found, saved, notes = trained(name, recipe)
    assert any("crossings:" in note for note in notes), "torch's min-cut has chosen"
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert saved <= bytes_of_min_cut


def test_a_users_checkpoint_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "PIPELINE", pipeline.CHOSEN)
    inner, last = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 16)

    def model(x: Tensor) -> Tensor:
        return last(checkpoint(inner, x, use_reentrant=False))

    backend = eager_backend(recipe="fp8")
    torch.compile(model, backend=backend)(torch.randn(8, 16)).sum().backward()
    assert not any("crossings:" in note for plan in backend.plans for note in plan.notes)
