"""MobileNet-v2 for 32x32 images: Sandler et al. 2018, table 2, with the first two strides set to 1.

Stride-1 blocks that change the number of channels have a 1x1 shortcut convolution, as in the CIFAR code the
mixed-precision paper builds on: with them the network has 58 GEMM operators.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.blocks import conv_bn, scaled

STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""(expansion, channels, blocks, stride of the first block) of each stage: t, c, n, s in the paper."""


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise, 1x1 linear bottleneck; a shortcut where the stride is 1.

    ``first`` of its stage: the shortcut is a 1x1 convolution, because the stage changes the channels.
    """

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int, first: bool) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.body = nn.Sequential(
            conv_bn(inputs, hidden),
            conv_bn(hidden, hidden, 3, stride=stride, groups=hidden),
            conv_bn(hidden, outputs, relu=False),
        )
        self.shortcut: nn.Module | None = None
        if stride == 1:
            self.shortcut = conv_bn(inputs, outputs, relu=False) if first else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return out if self.shortcut is None else out + self.shortcut(x)


class MobileNetV2(nn.Module):
    """Maps ``(batch, 3, 32, 32)`` images to ``(batch, num_classes)`` logits; 58 GEMM operators."""

    def __init__(self, num_classes: int = 100, width: float = 1.0) -> None:
        super().__init__()
        channels = scaled(32, width)
        self.stem = conv_bn(3, channels, 3)
        blocks: list[nn.Module] = []
        for expansion, base, repeats, stride in STAGES:
            outputs = scaled(base, width)
            for i in range(repeats):
                first = i == 0
                blocks.append(InvertedResidual(channels, outputs, expansion, stride if first else 1, first))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = conv_bn(channels, scaled(1280, width))
        self.classifier = nn.Linear(scaled(1280, width), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.head(self.blocks(self.stem(images)))
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(features, 1), 1))


def mobilenet_v2(num_classes: int = 100, width: float = 1.0) -> MobileNetV2:
    """CIFAR MobileNet-v2; ``width`` multiplies every hidden channel count."""
    return MobileNetV2(num_classes, width)
