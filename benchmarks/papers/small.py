"""A small network on 8x8 digits, compiled once a process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch

from benchmarks.papers import images
from benchmarks.papers.sweep import Batch, Network, Run
from examples.models.small_cnn import SmallCNN
from fxprec.plan import Plan

BATCH = 32


MAKERS = {"CNN": partial(SmallCNN, width=8)}


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


def train(
    name: str, plan: Plan | None, seed: int, steps: int, *, split: tuple[int, int] = (0, 1), **how: object
) -> Run:
    """Train one of the networks; None is float32."""
    return network(name).train(plan, seed, batches(seed, steps, split), held_out(), **how)  # type: ignore[arg-type]
