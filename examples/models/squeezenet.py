"""SqueezeNet for 32x32 images: Iandola et al. 2016, table 1 with simple bypass (their section 6).

The CIFAR form: a 3x3 stride-1 stem, 2x2 max-pools, and a batch norm after each convolution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.blocks import conv_bn, scaled

FIRES = ((16, 128), (16, 128), (32, 256), (32, 256), (48, 384), (48, 384), (64, 512), (64, 512))
"""(squeeze channels, output channels) of fire2 to fire9."""

POOL_AFTER = (2, 6)
"""Positions in ``FIRES`` after which the image is halved: fire4 and fire8."""


class Fire(nn.Module):
    """A 1x1 squeeze, then 1x1 and 3x3 expansions joined by a concat; bypassed where the shape stays."""

    def __init__(self, inputs: int, squeeze: int, outputs: int) -> None:
        super().__init__()
        self.squeeze = conv_bn(inputs, squeeze)
        self.expand1 = conv_bn(squeeze, outputs // 2)
        self.expand3 = conv_bn(squeeze, outputs - outputs // 2, 3)
        self.bypass = inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        squeezed = self.squeeze(x)
        out = torch.cat([self.expand1(squeezed), self.expand3(squeezed)], dim=1)
        return out + x if self.bypass else out


class SqueezeNet(nn.Module):
    """Maps ``(batch, 3, 32, 32)`` images to ``(batch, num_classes)`` logits; 26 GEMM operators."""

    def __init__(self, num_classes: int = 100, width: float = 1.0) -> None:
        super().__init__()
        channels = scaled(96, width)
        layers: list[nn.Module] = [conv_bn(3, channels, 3), nn.MaxPool2d(2)]
        for i, (squeeze, base) in enumerate(FIRES):
            outputs = scaled(base, width, multiple=2)
            layers.append(Fire(channels, scaled(squeeze, width), outputs))
            channels = outputs
            if i in POOL_AFTER:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Conv2d(channels, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        logits = self.classifier(self.features(images))
        return torch.flatten(F.adaptive_avg_pool2d(logits, 1), 1)


def squeezenet(num_classes: int = 100, width: float = 1.0) -> SqueezeNet:
    """CIFAR SqueezeNet; ``width`` multiplies every hidden channel count (kept even after each fire)."""
    return SqueezeNet(num_classes, width)
