"""Lee et al. 2023, Figures 6, 14 and 15: every assignment with and without promotion of what overflows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.papers import small, svg
from benchmarks.papers.claims import Claim, Verdict, exactly
from benchmarks.papers.found import Found, Row
from benchmarks.papers.sweep import Run, demoted

TITLE = "Promotion of what overflows"
SOURCE = "Figures 6, 14 and 15, section 5.4"
LOSS, PROMOTED, BEFORE = "held-out loss", "promoted, %", "steps before"
PUBLISHED = {"grouped, r = 1, promoting": {PROMOTED: "below 3"}}
SMALLER = (
    "Twelve residual convolutions without normalisation take the place of ShuffleNet on ImageNet. They train on "
    "8x8 digits for 100 steps of 32."
)
DEVIATES = (
    "The network has no normalisation. So its activations reach the largest number of 1-4-3 with bias 4 (30) "
    "within 100 steps, and not after epochs. *steps before* counts from the first overflow of at least 1 % of a "
    "tensor to the step at which the loss passes chance. Depth and rate were chosen by float32 alone, once a "
    "first run of five blocks had overflowed nowhere. At this depth and rate float32 trains, and its activations "
    "pass 30 (20 to 60 at the start, 30 late). What overflows saturates."
)
SEEDS = 3
STEPS, RATE = 100, 0.005


def run(seed: int, full: bool) -> Iterator[Row]:
    """Float32, then each assignment, first as it is and then promoting."""
    steps = STEPS * (3 if full else 1)
    everything = small.network("unnormalised").all_low
    plans = {
        "grouped, r = 0.6": demoted(everything, 0.6),
        "grouped, r = 1": everything,
        "operator": small.policy("unnormalised", "operator"),
        "operator-io": small.policy("unnormalised", "operator-io"),
    }
    exact = small.train("unnormalised", None, seed, steps, lr=RATE)
    yield "float32", {LOSS: exact.held_out_loss}
    for name, plan in plans.items():
        for promotes in (False, True):
            found = small.train("unnormalised", plan, seed, steps, promotes=promotes, lr=RATE)
            row = f"{name}, promoting" if promotes else name
            cells = {LOSS: found.held_out_loss, "held low, %": 100 * found.low_ratio, PROMOTED: 100 * found.promoted}
            cells |= {"largest overflow, %": 100 * max(found.overflow)} | _before(found)
            yield row, cells | {"overflow": found.overflow, "losses": found.losses}


def _before(found: Run) -> dict[str, float]:
    """Steps from the first overflow to the loss's jump; nothing where one of them is missing."""
    spike = next((i for i, ratio in enumerate(found.overflow) if ratio >= 0.01), None)
    jump = next((i for i, x in enumerate(found.losses) if i > 5 and not x < math.log(10)), None)
    if spike is None or jump is None or math.isfinite(found.held_out_loss):
        return {}
    return {BEFORE: float(jump - spike)}


def _rows(found: Found) -> list[str]:
    return [row for row in found.rows if f"{row}, promoting" in found.rows]


def divergence_goes(found: Found) -> Verdict:
    """Holds or fails where a run diverges without promotion."""
    without = [x for row in _rows(found) for x in found.samples(row, LOSS)]
    promoting = [x for row in _rows(found) for x in found.samples(f"{row}, promoting", LOSS)]
    lost, still = (sum(not math.isfinite(x) for x in runs) for runs in (without, promoting))
    detail = f"{lost} of {len(without)} runs diverged without, {still} with"
    if lost == 0:
        return Verdict("not shown", detail)
    return exactly(still == 0, detail)


def _is_no_worse(found: Found) -> Verdict:
    pairs = [
        (a, b)
        for row in _rows(found)
        for a, b in zip(found.samples(f"{row}, promoting", LOSS), found.samples(row, LOSS), strict=True)
        if math.isfinite(b)
    ]
    worst = max((a - b for a, b in pairs), default=math.nan)
    return exactly(
        worst <= 0.1, f"largest rise of the loss by promoting: {worst:.3f} of {len(pairs)} runs that trained"
    )


def _little_is_promoted(found: Found) -> Verdict:
    shares = {row: found.mean(f"{row}, promoting", PROMOTED) for row in _rows(found)}
    worst = max(shares, key=shares.__getitem__)
    return exactly(shares[worst] < 3, f"most with {worst}: {shares[worst]:.1f} %")


def _spikes_first(found: Found) -> Verdict:
    leads = [rows[row][BEFORE] for rows in found.seeds.values() for row in _rows(found) if BEFORE in rows[row]]
    if not leads:
        return Verdict("not shown", "no run overflowed and then diverged")
    return exactly(min(leads) >= 0, f"{min(leads):.0f} to {max(leads):.0f} steps in {len(leads)} runs")


NOTHING_OVERFLOWS = (
    "The claim's case does not arise: at most 1.6 % of a tensor's elements pass 30, and saturate. All four "
    "assignments were tried, with five blocks (none overflows at all) and with twelve. The paper's divergence "
    "comes after epochs of ImageNet. `assignments.overflow` has the case, with inputs so large that tensors "
    "overflow."
)

CLAIMS = [
    Claim("Runs that diverge without promotion train with it", divergence_goes, NOTHING_OVERFLOWS),
    Claim("Runs that train without promotion are no worse with it", _is_no_worse),
    Claim(
        "Less than 3 % of all elements are promoted",
        _little_is_promoted,
    ),
    Claim("Overflow spikes before the loss jumps", _spikes_first, NOTHING_OVERFLOWS),
]


def draw(found: Found) -> str:
    """Overflow and loss of one run without promotion."""
    first = next(iter(found.seeds.values()))["grouped, r = 1"]
    return svg.curves(
        {"largest overflow ratio": first["overflow"], "loss": first["losses"]}, "step", "grouped, r = 1, one run"
    )
