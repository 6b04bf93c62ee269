"""The paper's four CNNs, and digits as small colour images in batches of one size."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.papers.sweep import Batch
from examples.models.mobilenet import mobilenet_v2
from examples.models.resnet import resnet18
from examples.models.shufflenet import shufflenet_v2
from examples.models.squeezenet import squeezenet
from fxprec.demo.data import load_digits

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "squeezenet": squeezenet,
    "shufflenet_v2": shufflenet_v2,
    "mobilenet_v2": mobilenet_v2,
    "resnet18": resnet18,
}


@cache
def digits(size: int, channels: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images (count, channels, size, size) of mean about 0, and their labels."""
    data = load_digits()
    return (
        _enlarged(data.train_images, size, channels),
        data.train_labels,
        _enlarged(data.test_images, size, channels),
        data.test_labels,
    )


def _enlarged(images: Tensor, size: int, channels: int) -> Tensor:
    x = images if size == 8 else F.interpolate(images, size=(size, size), mode="bilinear")
    return ((x - 0.3) / 0.37).expand(-1, channels, -1, -1).contiguous()


def training(size: int, batch: int, steps: int, seed: int, split: tuple[int, int] = (0, 1)) -> list[Batch]:
    """Batches drawn from the training images; ``split`` (k, n) is the k-th of n parts of them."""
    x, y, _, _ = digits(size)
    x, y = x[split[0] :: split[1]], y[split[0] :: split[1]]
    generator = torch.Generator().manual_seed(seed)
    picks = [torch.randint(len(y), (batch,), generator=generator) for _ in range(steps)]
    return [(x[pick], y[pick]) for pick in picks]


def held_out(size: int, batch: int) -> list[Batch]:
    """The test images in whole batches."""
    _, _, x, y = digits(size)
    return [(x[i : i + batch], y[i : i + batch]) for i in range(0, len(y) - batch + 1, batch)]
