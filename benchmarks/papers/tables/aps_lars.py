"""Han et al. 2020, Table 5 and Figure 9: LARS, whose step follows each layer's gradient, on 8 ranks."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers import ranks
from benchmarks.papers.claims import Claim, no_worse
from benchmarks.papers.found import Row
from benchmarks.papers.ranks import FP32, Exchange

TITLE = "LARS on 8 ranks, with and without APS"
SOURCE = "Table 5, Figure 9"
ACCURACY, LOSS = "accuracy, %", "held-out loss"
PUBLISHED = {
    "float32": {ACCURACY: 92.072},
    "1-4-3 APS": {ACCURACY: 92.44},
    "1-4-3": {ACCURACY: 92.036},
    "1-5-2 APS": {ACCURACY: 92.015},
    "1-5-2": {ACCURACY: 91.737},
}
SMALLER = (
    "a residual CNN of 6,642 weights on 8x8 digits, 8 x 32 images a step, 60 steps, for ResNet-18 on CIFAR-10, 8K."
)
DEVIATES = (
    "ranks are simulated; sums in the format, without APS neither scaled nor divided and overflow is inf. LARS is You et "
    "al.'s with a trust coefficient of 0.02, on weights and not on biases and norms."
)
SEEDS = 3
RANKS, BATCH, STEPS, RATE, TRUST = 8, 256, 60, 1.0, 0.02
MARGIN = 0.05  # nats, set before anything was measured


def run(seed: int, full: bool) -> Iterator[Row]:
    """Every side on the same batches."""
    batches = list(ranks.digits(seed, BATCH, STEPS * (4 if full else 1)))
    for side in PUBLISHED:
        fmt = side.removesuffix(" APS")
        way = Exchange(fmt) if side.endswith("APS") else Exchange(f"{fmt}:ieee", "raw")
        way = FP32 if side == "float32" else way
        found = ranks.train(ranks.residual_cnn, seed, RANKS, batches, way, RATE, lars=TRUST)
        yield side, {ACCURACY: found.accuracy, LOSS: found.held_out_loss}


CLAIMS = [
    Claim(
        f"With APS {fmt} is no worse than without ({theirs})", no_worse(f"{fmt} APS", fmt, LOSS, MARGIN, is_loss=True)
    )
    for fmt, theirs in (("1-4-3", "92.44 and 92.04"), ("1-5-2", "92.02 and 91.74"))
]
