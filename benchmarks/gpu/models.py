"""The networks of rows 3 to 5: a Llama block, a 1.5-billion-parameter stack of it, and ResNet-50's shapes."""

from __future__ import annotations

from collections.abc import Sequence
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
    key_heads: int = 0
    """Heads of keys and values where several queries share one; 0: as many as of queries."""

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of queries, keys and values together."""
        shared = self.width * (self.key_heads or self.heads) // self.heads
        return self.width, shared, shared


LLAMA_BLOCK = Shape()
LLAMA_70B_BLOCK = Shape(width=8192, hidden=28672, heads=64, key_heads=8)
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
        self.heads, self.widths = shape.heads, shape.widths
        self.norm1, self.norm2 = Norm(shape.width), Norm(shape.width)
        self.qkv = nn.Linear(shape.width, sum(shape.widths), bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate_up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self._heads(self.qkv(self.norm1(x)))
        grouped = self.widths[1] != width
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def _heads(self, qkv: Tensor) -> Sequence[Tensor]:
        """Return q, k and v, (batch, heads, tokens, size)."""
        batch, tokens, _ = qkv.shape
        size = self.widths[0] // self.heads
        if self.widths[1] == self.widths[0]:
            return qkv.view(batch, tokens, 3, self.heads, size).permute(2, 0, 3, 1, 4).unbind()
        return [part.view(batch, tokens, -1, size).transpose(1, 2) for part in qkv.split(self.widths, -1)]


class Encoder(nn.Module):
    """(batch, tokens, width) to the same: BERT's layer, norms behind the sums, biases everywhere."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (y.view(batch, tokens, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = self.norm1(x + self.out(attended))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


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


class Stage(nn.Sequential):
    """ResNet-50's second stage: (batch, 256, 56, 56) to (batch, 512, 28, 28), four blocks."""

    def __init__(self, width: int = 64) -> None:
        first = Bottleneck(4 * width, 2 * width, 2)
        super().__init__(first, *(Bottleneck(8 * width, 2 * width, 1) for _ in range(3)))


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
