"""The networks of rows 3 to 5: a Llama block, a 1.5-billion-parameter stack of it, and ResNet-50's shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; Llama-3-8B's block, without its grouped queries."""

    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    layers: int = 1
    vocabulary: int = 0
    """0: no embedding and no head."""


LLAMA_BLOCK = Shape()
MODEL_1_5B = Shape(layers=6, vocabulary=8192)  # 6 blocks of 243e6, embedding and head of 34e6 each: 1.53e9
TINY = Shape(width=32, hidden=64, heads=2)
TINY_MODEL = Shape(width=32, hidden=64, heads=2, vocabulary=64)


class Norm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    """(batch, tokens, width) to the same: attention and a gated MLP, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1, self.norm2 = Norm(shape.width), Norm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate_up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Token ids (batch, tokens) to logits, or without a vocabulary vectors to vectors."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.embedding = nn.Embedding(shape.vocabulary, shape.width) if shape.vocabulary else nn.Identity()
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if shape.vocabulary else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).to(self.blocks[0].norm1.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions, with its projection."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(channels, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNetShapes(nn.Module):
    """ResNet-50's stem and the first block of each of its stages: all its shapes, a quarter of its blocks."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        sizes = [(width, width, 1), (4 * width, 2 * width, 2), (8 * width, 4 * width, 2), (16 * width, 8 * width, 2)]
        self.stages = nn.Sequential(*(Bottleneck(*size) for size in sizes))
        self.classifier = nn.Linear(32 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.stages(self.stem(x)).mean((2, 3)))
