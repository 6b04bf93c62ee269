"""Dettmers 2016, section 3.4: an MLP trained with gradients, or activations, in each of the four 8-bit types."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.papers import svg
from benchmarks.papers.claims import Claim
from benchmarks.papers.eight_bit import TYPES, Network, digits, same_as_float32, tested, train
from benchmarks.papers.found import Found, Row

TITLE = "An MLP with 8-bit gradients or 8-bit activations"
SOURCE = "section 3.4, MNIST"
PUBLISHED: dict[str, dict[str, float]] = {}
SMALLER = "8x8 digits (360 test images: one is 0.28 points) for MNIST; 64-128-128-10 for 784-1024-1024-10; 20 epochs."
DEVIATES = (
    "the error after the last epoch, where the paper takes the best one on the test set. Data parallel: every gradient "
    "is sent in 8 bits, none kept in 32, as in the paper's simulation. Model parallel: each layer's result, and its "
    "gradient. The paper prints no errors, only that they do not differ."
)
SEEDS = 10
EPOCHS = 20


def run(seed: int, full: bool) -> Iterator[Row]:
    """32 bits, then each type in both kinds of parallelism."""
    yield "32-bit", one(seed, None, None)
    for name in TYPES:
        yield f"data parallel, {name}", one(seed, name, None)
    for name in TYPES:
        yield f"model parallel, {name}", one(seed, None, name)


def one(seed: int, gradients: str | None, activations: str | None) -> dict[str, float]:
    """One training run."""
    torch.manual_seed(seed)
    model, data = Network(), digits()
    model.crosses = activations
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.003, alpha=0.9)
    train(model, data, optimizer, dict.fromkeys(model.parameters(), gradients) if gradients else {}, EPOCHS)
    return tested(model, data)


CLAIMS = [
    Claim("no type's test error differs from 32 bits, data or model parallel (99 %, Welch)", same_as_float32()),
    Claim("neither does a held-out loss", same_as_float32("loss")),
]


def draw(found: Found) -> str:
    """Test error of each type."""
    groups = {"32-bit": {"": found.mean("32-bit", "test error, %")}}
    for kind in ("data", "model"):
        groups[f"{kind} parallel"] = {n: found.mean(f"{kind} parallel, {n}", "test error, %") for n in TYPES}
    return svg.bars(groups, "test error, %")
