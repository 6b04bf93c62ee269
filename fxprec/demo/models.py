"""The two small networks of the demo: a residual CNN and a causal character transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class _Residual(nn.Module):
    """Two 3x3 convolutions with batch norm, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = _conv_bn(channels, channels, 3)
        self.conv2 = _conv_bn(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.conv2(F.relu(self.conv1(x))))


class SmallCNN(nn.Module):
    """A residual CNN with batch norm, a concat of two branches and skips.

    Maps ``(batch, 1, 8, 8)`` images to ``(batch, num_classes)`` logits. With ``width`` 16 it has 9 GEMM
    operators and 35,642 parameters.
    """

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.stem = _conv_bn(1, width, 3)
        self.block1 = _Residual(width)
        self.narrow = _conv_bn(width, width, 1)
        self.wide = _conv_bn(width, width, 3)
        self.down = _conv_bn(2 * width, 2 * width, 3, stride=2)
        self.block2 = _Residual(2 * width)
        self.classifier = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to logits (batch, classes)."""
        x = self.block1(F.relu(self.stem(images)))
        x = torch.cat([F.relu(self.narrow(x)), F.relu(self.wide(x))], dim=1)
        x = self.block2(F.relu(self.down(x)))
        result: Tensor = self.classifier(x.mean(dim=(2, 3)))
        return result


class _Block(nn.Module):
    """Pre-norm causal attention and a GELU feed-forward, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        shape = (batch, seq, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class CharTransformer(nn.Module):
    """A causal transformer over characters, with learned positions.

    Maps ``(batch, seq)`` int64 codes, ``seq`` at most ``context``, to ``(batch, seq, vocab)`` logits of the
    next character. It has ``5 * layers + 1`` GEMM operators, attention counted as one. ``tied`` uses the
    embedding table as the output matrix too. Raises ValueError when ``heads`` does not divide ``width``.
    """

    def __init__(
        self,
        *,
        vocab: int,
        context: int = 64,
        layers: int = 2,
        width: int = 64,
        heads: int = 4,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}; choose heads that divide it")
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)
        if tied:
            self.logits.weight = self.embed.weight

    def forward(self, codes: Tensor) -> Tensor:
        """Map codes of characters (batch, length) to logits (batch, length, characters)."""
        x = self.embed(codes) + self.position[: codes.shape[1]]
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.logits(self.norm(x))
        return result
