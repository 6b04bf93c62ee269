"""What the assignments of Lee et al. train here: the paper's four CNNs on digits, and two small transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.papers import images
from benchmarks.papers.sweep import Batch
from examples.models.char_transformer import CharTransformer
from fxprec.demo import data

SIZE, BATCH = 16, 32
PATCH = 4  # pixels a side
CONTEXT, HELD_OUT_WINDOWS = 32, 320


@dataclass(frozen=True)
class Workload:
    """A classifier and its data."""

    make: Callable[[], nn.Module]
    training: Callable[[int, int], list[Batch]]
    """Batches for a number of steps, from (seed, steps)."""
    held_out: Callable[[], list[Batch]]


class TextTransformer(nn.Module):
    """Maps (batch, seq) codes to (batch * seq, vocab) logits of the next character, as cross entropy takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = CharTransformer(vocab=data.VOCAB, context=CONTEXT, width=32, heads=2)

    def forward(self, codes: Tensor) -> Tensor:
        return self.body(codes).flatten(0, 1)


class PatchTransformer(nn.Module):
    """Maps (batch, 3, 16, 16) images to (batch, 10) logits: a transformer over patches of 4x4 pixels, in reading order."""

    def __init__(self) -> None:
        super().__init__()
        self.body = CharTransformer(vocab=10, context=(SIZE // PATCH) ** 2, width=32, heads=2)
        self.body.embed = nn.Linear(3 * PATCH**2, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(F.unfold(x, PATCH, stride=PATCH).transpose(1, 2)).mean(1)


def workload(name: str) -> Workload:
    """``text``, ``patches``, or a CNN as ``resnet18 x0.1``."""
    if name == "text":
        return Workload(TextTransformer, _text, _held_out_text)
    make: Callable[[], nn.Module] = PatchTransformer
    if name != "patches":
        network, width = name.split(" x")
        make = partial(images.NETWORKS[network], num_classes=10, width=float(width))
    return Workload(
        make,
        lambda seed, steps: images.training(SIZE, BATCH, steps, seed),
        lambda: images.held_out(SIZE, BATCH),
    )


@cache
def _codes() -> data.Text:
    return data.load_text()


def _windows(codes: Tensor, starts: Tensor) -> Batch:
    found = codes[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]
    return found[:, :-1].contiguous(), found[:, 1:].flatten()


def _text(seed: int, steps: int) -> list[Batch]:
    codes, generator = _codes().train, torch.Generator().manual_seed(seed)
    return [_windows(codes, torch.randint(len(codes) - CONTEXT, (BATCH,), generator=generator)) for _ in range(steps)]


def _held_out_text() -> list[Batch]:
    codes = _codes().held_out
    starts = torch.linspace(0, len(codes) - CONTEXT - 1, HELD_OUT_WINDOWS).long()
    return [_windows(codes, part) for part in starts.split(BATCH)]
