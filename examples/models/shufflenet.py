"""ShuffleNet-v2 (1x) for 32x32 images: Ma et al. 2018, table 5, with a stride-1 stem and no max-pool."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.blocks import conv_bn, scaled

STAGES = ((116, 4), (232, 8), (464, 4))
"""(channels, blocks) of each stage; the first block of a stage halves the image."""


def channel_shuffle(x: Tensor) -> Tensor:
    """Interleave the two halves of the channels of ``(batch, channels, height, width)``."""
    batch, channels, height, width = x.shape
    return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(x.shape)


class Unit(nn.Module):
    """Figure 3(c): half of the channels pass by, the other half through three convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            conv_bn(half, half), conv_bn(half, half, 3, groups=half, relu=False), conv_bn(half, half)
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, worked = x.chunk(2, dim=1)
        return channel_shuffle(torch.cat([kept, self.branch(worked)], dim=1))


class DownUnit(nn.Module):
    """Figure 3(d): two strided branches see all channels; their concat has the stage's channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        half = outputs // 2
        self.left = nn.Sequential(
            conv_bn(inputs, inputs, 3, stride=2, groups=inputs, relu=False), conv_bn(inputs, half)
        )
        self.right = nn.Sequential(
            conv_bn(inputs, half),
            conv_bn(half, half, 3, stride=2, groups=half, relu=False),
            conv_bn(half, half),
        )

    def forward(self, x: Tensor) -> Tensor:
        return channel_shuffle(torch.cat([self.left(x), self.right(x)], dim=1))


class ShuffleNetV2(nn.Module):
    """Maps ``(batch, 3, 32, 32)`` images to ``(batch, num_classes)`` logits; 57 GEMM operators."""

    def __init__(self, num_classes: int = 100, width: float = 1.0) -> None:
        super().__init__()
        channels = scaled(24, width)
        self.stem = conv_bn(3, channels, 3)
        units: list[nn.Module] = []
        for base, repeats in STAGES:
            outputs = scaled(base, width, multiple=2)
            units += [DownUnit(channels, outputs), *(Unit(outputs) for _ in range(repeats - 1))]
            channels = outputs
        self.units = nn.Sequential(*units)
        self.head = conv_bn(channels, scaled(1024, width))
        self.classifier = nn.Linear(scaled(1024, width), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.head(self.units(self.stem(images)))
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(features, 1), 1))


def shufflenet_v2(num_classes: int = 100, width: float = 1.0) -> ShuffleNetV2:
    """CIFAR ShuffleNet-v2; ``width`` multiplies every hidden channel count (kept even in the stages)."""
    return ShuffleNetV2(num_classes, width)
