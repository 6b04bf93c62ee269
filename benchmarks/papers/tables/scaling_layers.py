"""Zhao et al. 2020, Figures 2 and 3b: the scale of each layer, and how it moves over training."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from benchmarks.papers import svg
from benchmarks.papers.claims import Claim, Verdict, exactly
from benchmarks.papers.found import Found, Row
from benchmarks.papers.scaled import trained
from benchmarks.papers.tables import scaling_detector, scaling_segmentation

TITLE = "Scales by layer and over time"
SOURCE = "Figures 2 and 3b"
EXPONENT = "scale exponent, mean"
PUBLISHED: dict[str, dict[str, float]] = {}
SMALLER = "The networks are those of `scaling.detector` and `scaling.segmentation`."
DEVIATES = (
    "Shown are convolutions and linear layers only, and the softmax's cast (out). An exponent is of the whole "
    "scale that a layer's incoming gradient carries, as the mean over the second half of training."
)
SEEDS = 3
TASKS = {"detector": scaling_detector, "segmentation": scaling_segmentation}


def run(seed: int, full: bool) -> Iterator[Row]:
    """Each layer's incoming gradient."""
    for task, table in TASKS.items():
        found, _ = trained(task, "gradient", seed, table.STEPS * (3 if full else 1), table.RATE)
        for layer, exponents in found.exponents.items():
            if layer == "out" or layer.endswith((".0", ".3")):
                half = exponents[len(exponents) // 2 :]
                cells = {EXPONENT: fmean(half), "least": min(half), "largest": max(half)}
                yield f"{task}, {layer}", cells | {"over time": list(map(float, exponents))}


def _means(found: Found, start: str) -> dict[str, float]:
    return {row: found.mean(row, EXPONENT) for row in found.rows if row.startswith(start)}


def _peaks_at_heads(found: Found) -> Verdict:
    means = _means(found, "detector")
    peak = max(means, key=means.__getitem__)
    return exactly("heads" in peak, f"2^{means[peak]:.0f} at {peak}")


def _peaks_at_softmax(found: Found) -> Verdict:
    means = _means(found, "segmentation")
    peak = max(means, key=means.__getitem__)
    at_softmax, rest = means["segmentation, out"], [m for row, m in means.items() if row != "segmentation, out"]
    return exactly(at_softmax >= max(rest), f"2^{at_softmax:.0f} there, 2^{means[peak]:.0f} at {peak}")


def _scales_down(found: Found) -> Verdict:
    means = _means(found, "detector")
    lowest = min(means, key=means.__getitem__)
    return exactly(means[lowest] < 0, f"2^{means[lowest]:.0f} at {lowest}")


CLAIMS = [
    Claim("The largest scales are in the branches that predict", _peaks_at_heads),
    Claim(
        "The softmax's cast has the largest scale of the segmenter",
        _peaks_at_softmax,
        "Here the decoder's convolutions need larger scales: gradients that reach them have passed batch norms "
        "and are smaller than the softmax's by up to 2^8. The loss was divided by 48 (2^6 and 2^15) and by 253.",
    ),
    Claim("Large gradients are scaled down, which no scale of the loss above 1 does", _scales_down),
]


def draw(found: Found) -> str:
    """Figure 2: exponents from input to output."""
    means = _means(found, "detector")
    names = sorted(means)
    return svg.curves({"detector": [means[name] for name in names]}, "layer, backbone first", "scale exponent")
