"""Two small networks on 8x8 digits, compiled once a process: with batch norm, and without any normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.papers import images
from benchmarks.papers.sweep import Batch, Network, Run, by_policy
from examples.models.small_cnn import SmallCNN
from fxprec.plan import Plan

BATCH = 32


class Unnormalised(nn.Module):
    """Residual blocks without normalisation: activations grow with depth and with training."""

    def __init__(self, width: int = 8, blocks: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.classifier = nn.Linear(16 * width, 10)
        for layer in self.blocks:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(F.relu(x))
        return self.classifier(F.avg_pool2d(x, 2).flatten(1))


MAKERS = {"CNN": partial(SmallCNN, width=8), "unnormalised": Unnormalised}


def batches(seed: int, steps: int, split: tuple[int, int] = (0, 1)) -> list[Batch]:
    """Training batches."""
    return [(x[:, :1], y) for x, y in images.training(8, BATCH, steps, seed, split)]


@cache
def held_out() -> Sequence[Batch]:
    """Batches nobody trains on."""
    return [(x[:, :1], y) for x, y in images.held_out(8, BATCH)]


@cache
def network(name: str) -> Network:
    """With everything low; other plans are the table's."""
    torch.manual_seed(0)
    return Network(MAKERS[name], batches(0, 1)[0], low_ratio=1.0)


@cache
def policy(name: str, of: str) -> Plan:
    """What another policy makes low."""
    return by_policy(MAKERS[name], batches(0, 1)[0], of, network(name).all_low)


def train(
    name: str, plan: Plan | None, seed: int, steps: int, *, split: tuple[int, int] = (0, 1), **how: object
) -> Run:
    """Train one of the networks; None is float32."""
    return network(name).train(plan, seed, batches(seed, steps, split), held_out(), **how)  # type: ignore[arg-type]
