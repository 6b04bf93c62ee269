"""What is made again in backward stands before its first reader there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers import compiled, eager_backend

pytestmark = pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")


class Normed(nn.Module):
    """A root mean square norm in two steps, of which backward reads the second first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


def test_a_value_made_again_from_another_one_comes_after_it():
    model, x = nn.Sequential(nn.Linear(64, 64), Normed(), nn.Linear(64, 64)), torch.randn(32, 64)
    step = compiled(model, backend := eager_backend("fp8", low_ratio=1.0))
    step(x).square().sum().backward()
    assert "2 tensors are made again in backward, from the stored copy of their input" in backend.plans[0].notes
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for got, p in zip(found, model.parameters(), strict=True):
        assert F.cosine_similarity(got.flatten(), p.grad.flatten(), 0) > 0.995
