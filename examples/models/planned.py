"""Factories for ``fxprec dump``: full-size networks to plan without weights.

fxprec dump examples/models/planned.py:resnet50
fxprec dump examples/models/planned.py:transformer12
fxprec dump examples/models/planned.py:llama7b
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxprec.demo.models import CharTransformer


class Bottleneck(nn.Module):
    """1x1, 3x3 (strided) and 1x1 convolutions with batch norm, and a shortcut (He et al. 2016, figure 5)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """Maps ``(batch, 3, 224, 224)`` to ``(batch, 1000)``; 54 GEMM operators."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        blocks, inputs = [], 64
        for stage, depth in enumerate((3, 4, 6, 3)):
            width = 64 << stage
            for block in range(depth):
                blocks.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, 2, 1)
        return self.classifier(self.blocks(x).mean((2, 3)))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaLayer(nn.Module):
    """Attention with rotary embeddings and a SwiGLU feed-forward (Touvron et al. 2023, section 2.2)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Llama(nn.Module):
    """Maps token codes ``(batch, length)`` to logits ``(batch, length, vocab)``; 6.7 billion parameters as it is."""

    def __init__(
        self, vocab: int = 32000, width: int = 4096, layers: int = 32, heads: int = 32, hidden: int = 11008
    ) -> None:
        super().__init__()
        self.head_width = width // heads
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        rates = 10000.0 ** (-torch.arange(0, self.head_width, 2) / self.head_width)
        angles = torch.arange(codes.shape[1])[:, None] * rates
        x, cos, sin = self.embedding(codes), angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def resnet50() -> tuple[nn.Module, Tensor]:
    """ResNet-50 on 32 images."""
    return ResNet50(), torch.zeros(32, 3, 224, 224)


def transformer12() -> tuple[nn.Module, Tensor]:
    """Twelve layers of width 768, 8 sequences of 512."""
    model = CharTransformer(vocab=50257, context=512, layers=12, width=768, heads=12)
    return model, torch.zeros(8, 512, dtype=torch.int64)


def llama7b() -> tuple[nn.Module, Tensor]:
    """Llama 7B on one sequence of 2048."""
    return Llama(), torch.zeros(1, 2048, dtype=torch.int64)
