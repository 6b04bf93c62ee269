"""Han et al. 2020, Table 3 and Figures 7 and 8: segmentation on 8 ranks, with and without APS."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.func import functional_call

from benchmarks.papers.found import Row
from benchmarks.papers.ranks import SIDES, Ranks, aps_helps, exchange_of
from benchmarks.papers.scaled import CLASSES, mean_iou, shapes

TITLE = "Segmentation on 8 ranks, with and without APS"
SOURCE = "Table 3"
IOU, LOSS = "mIoU, %", "held-out loss"
PUBLISHED = {
    "float32": {IOU: 75.16},
    "1-4-3 APS": {IOU: 75.88},
    "1-4-3": {IOU: 74.6},
    "1-5-2 APS": {IOU: 74.76},
    "1-5-2": {IOU: 74.41},
}
SMALLER = (
    "A fully convolutional network of four layers trains on synthetic shapes of 24x24 pixels, for 120 steps of 8 x 2 "
    "images."
)
DEVIATES = (
    "Ranks are simulated. Sums are in the format. Without APS gradients are neither scaled nor divided, and "
    "overflow is inf. The paper starts from a pre-trained ResNet-50."
)
SEEDS = 3
RANKS, STEPS, RATE = 8, 120, 0.1
MARGIN = 0.02  # nats, set before anything was measured


def fcn(width: int = 8) -> nn.Module:
    """Three convolutions that see 15 pixels, and one a class."""
    layers: list[nn.Module] = []
    for inputs, dilation in ((3, 1), (width, 2), (width, 4)):
        layers += [nn.Conv2d(inputs, width, 3, padding=dilation, dilation=dilation, bias=False)]
        layers += [nn.BatchNorm2d(width, track_running_stats=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, CLASSES, 1))


def run(seed: int, full: bool) -> Iterator[Row]:
    """Every side on the same batches."""
    generator = torch.Generator().manual_seed(seed)
    batches = [shapes(2 * RANKS, 24, generator) for _ in range(STEPS * (4 if full else 1))]
    for side in SIDES:
        way = exchange_of(side)
        torch.manual_seed(seed)
        model = Ranks(fcn(), RANKS)
        model.train(batches, lambda step, name, way=way: way, RATE)
        yield side, _judge(model)


def _judge(model: Ranks) -> dict[str, float]:
    x, y = shapes(128, 24, torch.Generator().manual_seed(1000))
    with torch.no_grad():
        found = functional_call(model.model, model.parameters, (x,)).argmax(1)
    loss = model.loss(x, y)
    is_good = math.isfinite(loss) and loss < math.log(CLASSES)
    return {IOU: mean_iou(found, y), LOSS: loss if is_good else math.nan}


CLAIMS = aps_helps(LOSS, MARGIN, PUBLISHED)
