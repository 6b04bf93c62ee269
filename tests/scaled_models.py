"""A small network whose gradients are scaled, and its data."""

from __future__ import annotations

import torch
from torch import nn

TINY = 1e-9


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def data(n: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 16, generator=generator)
    return x, (x[:, :4] * x[:, 4:8]).tanh() + 0.5 * torch.randn(n, 4, generator=generator)


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]
