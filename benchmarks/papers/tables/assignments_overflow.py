"""Lee et al. 2023, Figure 6: promotion where tensors overflow in truth, on inputs that are many times as large."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from benchmarks.papers import small, svg
from benchmarks.papers.claims import Claim, lower
from benchmarks.papers.found import Found, Row
from benchmarks.papers.sweep import Batch, Network
from benchmarks.papers.tables.assignments_promotion import LOSS, PROMOTED, divergence_goes

TITLE = "Promotion where inputs are too large for 8 bits"
SOURCE = "Figure 6, section 5.4"
PUBLISHED: dict[str, dict[str, float]] = {}
SMALLER = "The network is that of `assignments.promotion`, everything low, 100 steps of 32."
DEVIATES = (
    "Inputs are 16 and 64 times as large as the network's own. So a quarter and nearly all of some tensor passes "
    "30, from the first step on. This case does not come up in `assignments.promotion` and is made by hand. So "
    "the table says nothing of how much is promoted (nearly half here, since nearly all overflows). Nor does it "
    "say what spikes first. The rates are float32's."
)
SEEDS, STEPS = 3, 100
RATES = {16: 2e-4, 64: 5e-5}


@cache
def network() -> Network:
    """Compiled on inputs of zeros, for nothing to be promoted yet."""
    torch.manual_seed(0)
    x, y = small.batches(0, 1)[0]
    return Network(small.Unnormalised, (torch.zeros_like(x), y), low_ratio=1.0)


def run(seed: int, full: bool) -> Iterator[Row]:
    """Float32, then all of it low, as it is and promoting."""
    for times, rate in RATES.items():

        def larger(batches: list[Batch], times: int = times) -> list[Batch]:
            return [(times * x, y) for x, y in batches]

        data = larger(small.batches(seed, STEPS * (3 if full else 1))), larger(list(small.held_out()))
        for side in ("float32", "low", "low, promoting"):
            plan = None if side == "float32" else network().all_low
            found = network().train(plan, seed, *data, promotes=side.endswith("promoting"), lr=rate)
            cells = {LOSS: found.held_out_loss, "accuracy, %": found.accuracy}
            if plan is not None:
                cells |= {PROMOTED: 100 * found.promoted, "largest overflow, %": 100 * max(found.overflow)}
            yield f"inputs x{times}, {side}", cells | {"losses": found.losses}


CLAIMS = [
    Claim("Runs that diverge without promotion train with it", divergence_goes),
    Claim(
        "Runs that train without promotion train better with it",
        lower("inputs x16, low, promoting", "inputs x16, low", LOSS),
    ),
]


def draw(found: Found) -> str:
    """Training losses at the larger scale."""
    rows = [row for row in found.rows if row.startswith("inputs x64")]
    return svg.curves({row: found.curve(row, "losses") for row in rows}, "step", "training loss", is_log=True)
