"""What the CIFAR networks share: the width multiplier and convolution with batch norm."""

from __future__ import annotations

from torch import nn


def scaled(channels: int, width: float, multiple: int = 1) -> int:
    """Channels times the width multiplier, rounded to the nearest ``multiple``, never below one multiple.

    Source: Howard et al. 2017 (MobileNets), section 3.3. Raises ValueError when ``width`` is not above 0.
    """
    if not width > 0:
        raise ValueError(f"width {width!r} is not above 0; give a multiplier such as 1.0, 0.5 or 0.25")
    return max(multiple, round(channels * width / multiple) * multiple)


def conv_bn(
    inputs: int, outputs: int, kernel: int = 1, *, stride: int = 1, groups: int = 1, relu: bool = True
) -> nn.Sequential:
    """A convolution of odd ``kernel`` without bias, padded to keep the size, batch norm, and a ReLU if asked.

    Maps ``(batch, inputs, height, width)`` to ``(batch, outputs, height / stride, width / stride)``.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([nn.ReLU()] if relu else []))
