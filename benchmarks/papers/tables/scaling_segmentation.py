"""Zhao et al. 2020, Table 3 and section 5.4: a pixel-wise softmax whose gradients are too small for fp16."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import torch

from benchmarks.papers import svg
from benchmarks.papers.claims import Claim, Verdict, exactly, higher, no_worse
from benchmarks.papers.found import Found, Row
from benchmarks.papers.scaled import MICRO_BATCHES, mean_iou, shapes, trained, with_weights

TITLE = "Segmentation under each scaling"
SOURCE = "Table 3, section 5.4"
IOU, UNDERFLOW, LOSS = "mIoU, %", "underflow at the softmax's cast, %", "training loss"
PUBLISHED = {
    "float32": {IOU: 51.1},
    "none": {IOU: "diverged", UNDERFLOW: "about 70"},
    "dynamic": {IOU: 48.3},
    "gradient": {IOU: 49.6, UNDERFLOW: "below 0.1"},
}
SMALLER = (
    "An encoder-decoder of six convolutions takes the place of SegNet on CamVid. It trains on synthetic shapes "
    "of 32x32 pixels, batch 8, for 120 steps. Its loss is divided by 253. So a pixel's gradient is as small as "
    "in the paper's batch of 12 x 172,800 pixels."
)
DEVIATES = (
    "fp16 saturates in gradients, so *none* cannot diverge. The optimizer is Adam with an epsilon of 1e-20. "
    "Held-out images are judged in float32. Underflow is the mean over the second half of training, of all "
    "elements. The divisor of the loss, 253, is the paper's number of pixels and images over ours. With 48, as "
    "first tried, almost nothing underflowed."
)
SEEDS = 3
STEPS, RATE = 120, 4e-3
MARGIN = 1.0  # points, set before anything was measured


def run(seed: int, full: bool) -> Iterator[Row]:
    """All ways to scale, on the same batches."""
    for side in PUBLISHED:
        found, weights = trained("segmentation", side, seed, STEPS * (3 if full else 1), RATE)
        cells = {IOU: _mean_iou(weights), LOSS: MICRO_BATCHES * found.loss, "steps skipped": found.skipped}
        if side != "float32":
            lost = found.underflow["out"]
            cells[UNDERFLOW] = 100 * fmean(lost[len(lost) // 2 :])
            cells["underflow by step"] = [100 * x for x in lost]
        yield side, cells


def _mean_iou(weights: dict[str, torch.Tensor]) -> float:
    """Of 128 images nobody trained on, in percent."""
    model, generator = with_weights("segmentation", weights).eval(), torch.Generator().manual_seed(1000)
    pictures, labels = shapes(128, 32, generator)
    with torch.no_grad():
        _, found = model(pictures, labels)
    return mean_iou(found, labels)


def _underflows(found: Found) -> Verdict:
    none, scaled = found.mean("none", UNDERFLOW), found.mean("gradient", UNDERFLOW)
    return exactly(none > 50 and scaled < 0.1, f"{none:.1f} % and {scaled:.3g} %")


CLAIMS = [
    Claim(
        "Without a scale most of the softmax's gradient underflows (paper: about 70 %), with its own below 0.1 %",
        _underflows,
    ),
    Claim(
        "Gradient scaling's mIoU is no worse than dynamic loss scaling's (paper: 49.6 and 48.3)",
        no_worse("gradient", "dynamic", IOU, MARGIN, is_loss=False),
        "Seeds differ by as much as the margin of a point. Gradient scaling has the lower training loss in each "
        "of the first three seeds (by 0.004, 0.007 and 0.015).",
    ),
    Claim("Gradient scaling's mIoU is higher than without a scale (paper: diverged)", higher("gradient", "none", IOU)),
]


def draw(found: Found) -> str:
    """Underflow at the softmax's cast by step."""
    sides = [row for row in found.rows if row != "float32"]
    return svg.curves({s: found.curve(s, "underflow by step") for s in sides}, "step", UNDERFLOW)
