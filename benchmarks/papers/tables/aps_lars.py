"""Han et al. 2020, Table 5 and Figure 9: LARS, whose step follows each layer's gradient, on 8 ranks."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers import ranks
from benchmarks.papers.found import Row

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
    "A residual CNN of 6,642 weights takes the place of ResNet-18 on CIFAR-10, 8K. It trains on 8x8 digits for "
    "60 steps of 8 x 32 images."
)
DEVIATES = (
    "Ranks are simulated. Sums are in the format. Without APS gradients are neither scaled nor divided, and "
    "overflow is inf. LARS is You et al.'s with a trust coefficient of 0.02. It is applied to weights, and not "
    "to biases and norms."
)
SEEDS = 3
RANKS, BATCH, STEPS, RATE, TRUST = 8, 256, 60, 1.0, 0.02
MARGIN = 0.05  # nats, set before anything was measured


def run(seed: int, full: bool) -> Iterator[Row]:
    """Every side on the same batches."""
    batches = list(ranks.digits(seed, BATCH, STEPS * (4 if full else 1)))
    for side in ranks.SIDES:
        found = ranks.train(ranks.residual_cnn, seed, RANKS, batches, ranks.exchange_of(side), RATE, lars=TRUST)
        yield side, {ACCURACY: found.accuracy, LOSS: found.held_out_loss}


CLAIMS = ranks.aps_helps(LOSS, MARGIN, PUBLISHED)
