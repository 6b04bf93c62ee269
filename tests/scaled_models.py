"""A small network whose gradients are scaled, its data, and its backend."""

from __future__ import annotations

from typing import Any

import helpers
import torch
from torch import nn

import fxprec

TINY = 1e-9


def eager_backend(recipe: Any, **options: Any) -> fxprec.Backend:
    """A backend that stores, and scales, every gradient a GEMM multiplies.

    Under ``compute="high"`` a CPU stores those of recipe fp16 alone, which GEMMs multiply in float16.
    """
    compute = None if options.get("storage", "simulate") == "simulate" or recipe == "fp16" else "stored"
    return helpers.eager_backend(recipe, **{"compute": compute, **options})


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def data(n: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 16, generator=generator)
    return x, (x[:, :4] * x[:, 4:8]).tanh() + 0.5 * torch.randn(n, 4, generator=generator)


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]
