"""ResNet-18 for 32x32 images: He et al. 2016, with the 3x3 stem and no max-pool usual on CIFAR."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.blocks import conv_bn, scaled

STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""(channels, stride of the first block) of each stage; two blocks a stage."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv_bn(inputs, outputs, 3, stride=stride)
        self.conv2 = conv_bn(outputs, outputs, 3, relu=False)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv_bn(inputs, outputs, 1, stride=stride, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(self.conv1(x)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Maps ``(batch, 3, 32, 32)`` images to ``(batch, num_classes)`` logits; 21 GEMM operators."""

    def __init__(self, num_classes: int = 100, width: float = 1.0) -> None:
        super().__init__()
        channels = scaled(STAGES[0][0], width)
        self.stem = conv_bn(3, channels, 3)
        blocks: list[nn.Module] = []
        for base, stride in STAGES:
            outputs = scaled(base, width)
            blocks += [BasicBlock(channels, outputs, stride), BasicBlock(outputs, outputs, 1)]
            channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.stem(images))
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(features, 1), 1))


def resnet18(num_classes: int = 100, width: float = 1.0) -> ResNet18:
    """CIFAR ResNet-18; ``width`` multiplies every hidden channel count."""
    return ResNet18(num_classes, width)
