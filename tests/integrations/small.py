"""A small training for tests of trainers and tools: activations that overflow 8 bits, batches by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

OPTIONS: dict[str, Any] = {"recipe": "hfp8", "low_ratio": 1.0, "storage": "simulate", "lowering": "eager"}


class Loud(nn.Module):
    """(batch, 8) to (batch, 4); the product of its second layer overflows 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(100 * self.b(torch.relu(self.a(x)))))


def batch(step: int, rank: int = 0) -> Tensor:
    """(8, 8), louder every third step."""
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * rank + step)) * (1 + step % 3)
