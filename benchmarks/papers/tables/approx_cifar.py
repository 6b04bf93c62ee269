"""Dettmers 2016, section 3.4: a CNN, its convolutions data parallel, its dense layers model parallel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.papers.claims import Claim, Verdict, mean_and_error, together
from benchmarks.papers.eight_bit import TYPES, crossing, digits, same_as_float32, sent
from benchmarks.papers.found import Found, Row
from fxprec.demo.data import Digits

TITLE = "A CNN: 8-bit gradients of convolutions, 8-bit activations of dense layers"
SOURCE = "section 3.4, CIFAR-10"
PUBLISHED: dict[str, dict[str, float]] = {}
SMALLER = (
    "The data is 8x8 digits under noise of standard deviation 0.5. The noise is drawn anew for every batch, and "
    "four times for the test. So the error is tens of percent, and 2 % of it can be seen. The network has two "
    "convolutions (3x3, 16 and 32 channels) and two dense layers."
)
DEVIATES = "Dense layers stand for the paper's locally connected ones. Contrast is not normalised."
SEEDS = 10
EPOCHS, NOISE, MARGIN = 12, 0.5, 2.0
ERROR = "test error, %"


class Network(nn.Module):
    """Convolutions, then dense layers whose results and gradients are sent in ``crosses``."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
        )
        self.dense, self.out = nn.Linear(32 * 16, 64), nn.Linear(64, 10)
        self.crosses: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = crossing(self.convolutions(x).flatten(1), self.crosses)
        x = crossing(self.dense(x).relu(), self.crosses)
        return crossing(self.out(x), self.crosses)


def run(seed: int, full: bool) -> Iterator[Row]:
    """32 bits, then each type."""
    for name in (None, *TYPES):
        yield name or "32-bit", one(seed, name)


def one(seed: int, name: str | None) -> dict[str, float]:
    """One training run."""
    torch.manual_seed(seed)
    model, data = Network(), digits()
    model.crosses = name
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(data.train_labels)).split(64):
            optimizer.zero_grad()
            images = data.train_images[chosen]
            noisy = images + NOISE * torch.randn(images.shape)
            functional.cross_entropy(model(noisy), data.train_labels[chosen]).backward()
            if name is not None:
                for p in model.convolutions.parameters():
                    p.grad = sent(p.grad, name)
            optimizer.step()
    return tested(model, data)


def tested(model: nn.Module, data: Digits) -> dict[str, float]:
    """Loss and error on four draws of noise, the same for every run."""
    model.eval()
    g = torch.Generator().manual_seed(99)
    images, labels = data.test_images.repeat(4, 1, 1, 1), data.test_labels.repeat(4)
    with torch.no_grad():
        logits = model(images + NOISE * torch.randn(images.shape, generator=g))
    wrong = float((logits.argmax(1) != labels).float().mean() * 100)
    return {"loss": float(functional.cross_entropy(logits, labels)), ERROR: wrong}


def _two_percent(found: Found) -> Verdict:
    """Every type's relative difference, its uncertainty included, is at most 2 %."""
    verdicts = []
    for name in TYPES:
        pairs = found.pairs(name, "32-bit", ERROR)
        mean, error = mean_and_error([100 * (x / y - 1) for x, y in pairs])
        detail = f"{name} {mean:+.1f} ± {2 * error:.1f} %"
        state = (
            "holds" if abs(mean) + 2 * error <= MARGIN else "fails" if abs(mean) - 2 * error > MARGIN else "not shown"
        )
        verdicts.append(Verdict(state, detail))
    return together(*verdicts)


CLAIMS = [
    Claim(
        "test errors in 8 and 32 bits differ by at most 2 %, relative to each other",
        _two_percent,
        "The dynamic tree and linear types differ from 32 bits by less than their uncertainty, which more seeds "
        "would narrow. The mantissa type is the coarsest of the four and does look worse: at an error of 27 % "
        "the test tells 5 % apart.",
    ),
    Claim("no type's test error differs from 32 bits (99 %, Welch)", same_as_float32(ERROR)),
]
