"""The demo's tasks: a model, its batches, and its score on data that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxprec.demo import data
from fxprec.demo.models import CharTransformer, SmallCNN

Batches = Callable[[int], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Task:
    """One task. Both networks are trained by cross-entropy and AdamW, with one cycle of the learning rate."""

    name: str
    metric: str
    """Name of the result of ``evaluate``: ``"accuracy"`` (share, 0..1) or ``"loss"`` (nats per character)."""
    make_model: Callable[[], nn.Module]
    batches: Batches
    """Maps a seed to endless (inputs, targets) of one fixed shape."""
    evaluate: Callable[[nn.Module], float]
    learning_rate: float
    steps: int


def digits_task(*, steps: int = 220, batch: int = 64) -> Task:
    """Return the task of the small CNN on 8x8 digits; the score is test accuracy on 359 images."""
    digits = data.load_digits()

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(digits.train_labels), generator=generator)
            for chosen in torch.split(order, batch)[: len(order) // batch]:
                yield digits.train_images[chosen], digits.train_labels[chosen]

    def evaluate(model: nn.Module) -> float:
        predicted = model(digits.test_images).argmax(dim=1)
        return float((predicted == digits.test_labels).float().mean())

    return Task("digits", "accuracy", SmallCNN, batches, evaluate, learning_rate=5e-3, steps=steps)


def text_task(*, steps: int = 250, batch: int = 32, context: int = 64) -> Task:
    """Return the task of the character transformer on Python source; the score is the loss on a held-out tenth."""
    text = data.load_text()

    def windows(codes: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        found = codes[starts.unsqueeze(1) + torch.arange(context + 1)]
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield windows(text.train, torch.randint(len(text.train) - context, (batch,), generator=generator))

    def evaluate(model: nn.Module) -> float:
        inputs, targets = windows(text.held_out, torch.linspace(0, len(text.held_out) - context - 1, 256).long())
        return float(cross_entropy(model(inputs), targets))

    def make_model() -> nn.Module:
        return CharTransformer(vocab=data.VOCAB, context=context)

    return Task("text", "loss", make_model, batches, evaluate, learning_rate=4e-3, steps=steps)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats; ``logits`` has one dimension more than ``targets``, the last."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


TASKS: dict[str, Callable[..., Task]] = {"digits": digits_task, "text": text_task}
