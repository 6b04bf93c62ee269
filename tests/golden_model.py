"""The model whose pass texts are golden. Its lines are in those texts: moving one means regenerating them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A convolution, a norm and ReLU; attention over the pixels with a residual; a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16, track_running_stats=False)
        self.qkv = nn.Linear(16, 48)
        self.up = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(2).mT.contiguous()
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v).squeeze(1)
        gate, value = self.up(x).chunk(2, -1)
        return F.silu(gate) * value


def make() -> tuple[nn.Module, Tensor]:
    return Block(), torch.ones(256, 3, 16, 16)


class Larger(nn.Module):
    """The larger of two linear layers' results."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 32), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(self.one(x), self.other(x))


def make_maximum() -> tuple[nn.Module, Tensor]:
    return Larger(), torch.ones(256, 16)


class Gated(nn.Module):
    """The gated layer, and the projection behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def make_gated() -> tuple[nn.Module, Tensor]:
    return Gated(), torch.ones(256, 16)
