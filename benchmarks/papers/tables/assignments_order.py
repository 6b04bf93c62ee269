"""Lee et al. 2023, Figure 6: groups demoted largest first, at random, and smallest first."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from benchmarks.papers import small, svg
from benchmarks.papers.claims import Claim, no_worse
from benchmarks.papers.found import Found, Row
from benchmarks.papers.sweep import demoted

TITLE = "The order in which groups are demoted"
SOURCE = "Figure 6"
LOSS = "held-out loss, mean over ratios"
PUBLISHED: dict[str, dict[str, float]] = {}
SMALLER = (
    "A residual CNN of 10 groups takes the place of four CNNs on CIFAR-100. It trains on 8x8 digits for 100 steps of "
    "32, at ratios of 0.25 to 0.75."
)
DEVIATES = (
    "The area under the curve takes the place of the curve. The curve runs over what is held low in truth (the "
    "next column), because orders overshoot a ratio differently. Ten groups, of which the largest holds a fifth, "
    "leave orders little to differ in."
)
SEEDS = 3
RATIOS, STEPS = (0.25, 0.5, 0.75), 100
ORDERS = ("size", "random", "ascending")
MARGIN = 0.02  # nats, set before anything was measured


def run(seed: int, full: bool) -> Iterator[Row]:
    """Each order at each ratio; a random one a seed."""
    steps = STEPS * (3 if full else 1)
    everything = small.network("CNN").all_low
    for order in ORDERS:
        runs = [small.train("CNN", demoted(everything, r, order, seed), seed, steps) for r in RATIOS]
        losses = [found.held_out_loss for found in runs]
        yield (
            order,
            {LOSS: fmean(losses), "held low, %": 100 * fmean(found.low_ratio for found in runs), "losses": losses},
        )


CLAIMS = [
    Claim("Largest first is no worse than a random order", no_worse("size", "random", LOSS, MARGIN, is_loss=True)),
    Claim(
        "A random order is no worse than smallest first", no_worse("random", "ascending", LOSS, MARGIN, is_loss=True)
    ),
    Claim("Largest first is no worse than smallest first", no_worse("size", "ascending", LOSS, MARGIN, is_loss=True)),
]


def draw(found: Found) -> str:
    """Loss by ratio."""
    lines = {order: found.curve(order, "losses") for order in ORDERS}
    return svg.curves(lines, "low ratio asked for", "held-out loss", xs=RATIOS)
