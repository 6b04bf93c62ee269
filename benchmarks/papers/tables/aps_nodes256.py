"""Han et al. 2020, Tables 6 to 8 and Figure 10: 256 ranks, groups, the last layer in float32, hybrid precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.papers import ranks, svg
from benchmarks.papers.claims import Claim, Predicate, lower, none_worse
from benchmarks.papers.found import Found, Row
from benchmarks.papers.ranks import FP32, Exchange

TITLE = "256 ranks: groups, the last layer, hybrid precision"
SOURCE = "Tables 6 to 8, Figure 10"
ACCURACY, LOSS = "accuracy, %", "held-out loss"
PRINTED = {
    "float32": 76.02,
    "1-5-2 APS, last fp32": 75.98,
    "1-5-2, last fp32": 71.0,
    "1-4-3 APS, last fp32": 75.93,
    "1-4-3, last fp32": 0.1,
    "hybrid: fp32, then 1-4-3 APS": 76.09,
    "1-5-2 APS": 75.08,
    "1-4-3 APS": 75.46,
    "1-5-2 APS, groups of 32": 74.91,
    "1-4-3 APS, groups of 32": 74.95,
}
PUBLISHED = {side: {ACCURACY: value} for side, value in PRINTED.items()}
SMALLER = (
    "A residual CNN of 6,642 weights takes the place of ResNet-50 on ImageNet, 8K. It trains on 8x8 digits for "
    "30 steps of 256 x 4 images."
)
DEVIATES = (
    "Ranks are simulated in one process. Groups have 16 ranks where nothing else is said. Sums are in the "
    "format. Without APS gradients are neither scaled nor divided, and overflow is inf. Hybrid is float32 for a "
    "third of the steps. A run that ends no better than chance is *diverged*."
)
SEEDS = 3
RANKS, STEPS, RATE = 256, 30, 0.4
MARGIN = 0.05  # nats, set before anything was measured
Way = Callable[[int, str], Exchange]


def run(seed: int, full: bool) -> Iterator[Row]:
    """Every side on the same batches."""
    batches = list(ranks.digits(seed, 4 * RANKS, STEPS * (4 if full else 1)))
    for side, way in ways(len(batches)).items():
        found = ranks.train(ranks.residual_cnn, seed, RANKS, batches, way, RATE)
        cells = {ACCURACY: found.accuracy, LOSS: found.held_out_loss}
        yield side, cells | {"curve": found.curve(len(batches))}


def ways(steps: int) -> dict[str, Way]:
    """What each step and parameter travels in, by side."""

    def all_of(exchange: Exchange) -> Way:
        return lambda step, name: exchange

    def but_last(exchange: Exchange) -> Way:
        return lambda step, name: FP32 if name.startswith("6.") else exchange

    found: dict[str, Way] = {"float32": all_of(FP32)}
    for fmt in ("1-5-2", "1-4-3"):
        scaled = Exchange(fmt, group_size=16)
        found[f"{fmt} APS, last fp32"] = but_last(scaled)
        found[f"{fmt}, last fp32"] = but_last(Exchange(f"{fmt}:ieee", "raw", group_size=16))
        found[f"{fmt} APS"] = all_of(scaled)
        found[f"{fmt} APS, groups of 32"] = all_of(Exchange(fmt, group_size=32))
    late = but_last(Exchange("1-4-3", group_size=16))
    found["hybrid: fp32, then 1-4-3 APS"] = lambda step, name: FP32 if step < steps // 3 else late(step, name)
    return found


def _no_worse(a: str, b: str, formats: tuple[str, ...] = ("1-5-2", "1-4-3")) -> Predicate:
    return none_worse([(f"{f}{a}", f"{f}{b}") for f in formats], LOSS, MARGIN, is_loss=True)


LARGE_ENOUGH = (
    "Gradients of a network this small are large enough to need no scale. Half of a rank's elements are above "
    "0.01, the largest is about 1, and sums over 256 ranks reach 24. The range of 1-4-3 ends at 2^-10 (4 to 6 % "
    "are below) and 240. Divided by 256 first, 99.7 % and more would be zero. So size is the cause, as in "
    "`aps.table4`."
)

CLAIMS = [
    Claim(
        "1-4-3 fails without APS (paper: 0.1) and does not fail with APS (75.93)",
        lower("1-4-3 APS, last fp32", "1-4-3, last fp32", LOSS),
        LARGE_ENOUGH,
    ),
    Claim(
        "1-5-2 without APS is worse than with it (paper: 71.00 and 75.98)",
        lower("1-5-2 APS, last fp32", "1-5-2, last fp32", LOSS),
        LARGE_ENOUGH,
    ),
    Claim(
        "The last layer in float32 does no harm (paper: helps by 0.9 and 0.5 points)",
        _no_worse(" APS, last fp32", " APS"),
    ),
    Claim(
        "Groups of 16 are no worse than groups of 32 (paper: 0.2 and 0.5 points better)",
        _no_worse(" APS", " APS, groups of 32"),
    ),
    Claim(
        "Hybrid precision is no worse than float32 (paper: 76.09 and 76.02)",
        _no_worse("hybrid: fp32, then 1-4-3 APS", "float32", formats=("",)),
    ),
]


def draw(found: Found) -> str:
    """Figure 10: training loss by step."""
    shown = ("float32", "1-4-3 APS, last fp32", "1-4-3 APS", "1-4-3, last fp32", "hybrid: fp32, then 1-4-3 APS")
    return svg.curves({side: found.curve(side, "curve") for side in shown}, "step", "training loss")
