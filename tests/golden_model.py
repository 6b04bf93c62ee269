"""The model whose pass texts are golden. Its lines are in those texts: moving one means regenerating them."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.leave = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        h = h + torch.relu(h)
        return self.leave(h)


def make() -> tuple[nn.Module, torch.Tensor]:
    return Block(), torch.ones(32, 8)
