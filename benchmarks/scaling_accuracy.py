"""Training where one loss scale cannot serve all gradients: fp32, no scale, loss scaling, gradient scaling.

    python -m benchmarks.scaling_accuracy detector
    python -m benchmarks.scaling_accuracy segmentation

``detector``: one backbone, four heads whose losses are weighted from 1e3 down to 1e-6. ``segmentation``: an
encoder-decoder with a pixel-wise softmax on synthetic shapes; its loss is divided by 48, as for one of 48 micro-batches.
fp16, storage simulate, Adam; all sides see the same data.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from benchmarks import machine

MICRO_BATCHES = 48
WEIGHTS = (1e3, 1.0, 1e-3, 1e-6)
SIDES: dict[str, object] = {
    "fp32": None,
    "none": "none",
    "fixed 128": fxprec.LossScaling(initial=128.0, dynamic=False),
    "dynamic": fxprec.LossScaling(growth_interval=100),
    "statistical": fxprec.GradScaling(),
    "histogram": fxprec.GradScaling(estimate="histogram"),
}
CLASSES = 4
GRID = 4  # cells a side
HEADS = (CLASSES, GRID**2, GRID**2, GRID**2)  # outputs


def shapes(batch: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (batch, 3, size, size) with one square, disc and cross each, and their classes by pixel; 0 is nothing."""
    rows = torch.arange(size).view(1, size, 1)
    columns = torch.arange(size).view(1, 1, size)
    labels = torch.zeros(batch, size, size, dtype=torch.int64)
    for kind in range(1, CLASSES):
        y, x = (torch.randint(4, size - 4, (batch, 1, 1), generator=generator) for _ in range(2))
        radius = torch.randint(3, 6, (batch, 1, 1), generator=generator)
        down, across = (rows - y).abs(), (columns - x).abs()
        inside = {
            1: torch.maximum(down, across) < radius,
            2: down**2 + across**2 < radius**2,
            3: (torch.minimum(down, across) < 2) & (torch.maximum(down, across) < radius),
        }[kind]
        labels[inside] = kind
    colors = torch.tensor([[0.0, 0, 0], [1, 0.3, 0.3], [0.3, 1, 0.3], [0.3, 0.3, 1]])
    images = colors[labels].permute(0, 3, 1, 2)
    return images + 0.3 * torch.randn(images.shape, generator=generator), labels


def block(inside: int, out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


class Segmenter(nn.Module):
    """Two levels down, two up, skips added."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.one, self.two = block(3, width), block(width, 2 * width, 2)
        self.three = block(2 * width, 4 * width, 2)
        self.up_two, self.up_one = block(4 * width, 2 * width), block(2 * width, width)
        self.out = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        one = self.one(x)
        two = self.two(one)
        up = self.up_two(F.interpolate(self.three(two), scale_factor=2.0)) + two
        logits = self.out(self.up_one(F.interpolate(up, scale_factor=2.0)) + one)
        return F.cross_entropy(logits, labels) / MICRO_BATCHES, logits.detach().argmax(1)


class Detector(nn.Module):
    """A backbone and four heads: how much of the image each class fills, and where each kind of shape lies."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.backbone = nn.Sequential(block(3, width), block(width, 2 * width, 2), block(2 * width, 4 * width, 2))
        self.heads = nn.ModuleList(
            nn.Sequential(block(4 * width, width), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, n))
            for n in HEADS
        )

    def forward(self, x: Tensor, *targets: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(x)
        losses = torch.stack([F.mse_loss(h(features), t) for h, t in zip(self.heads, targets, strict=True)])
        return (losses * torch.tensor(WEIGHTS)).sum(), losses.detach()


def detector_batch(generator: torch.Generator, count: int = 16) -> tuple[Tensor, ...]:
    """Images; the share of each class in the image; for each kind its share in each cell. Noise of 0.5 is on all."""
    images, labels = shapes(count, 24, generator)
    present = F.one_hot(labels, CLASSES).permute(0, 3, 1, 2).float()
    cells = F.adaptive_avg_pool2d(present, GRID).flatten(2)
    targets = (20 * (cells.mean(2) - cells.new_tensor([0.85, 0.05, 0.05, 0.05])), *(5 * cells[:, 1:]).unbind(1))
    return images, *(t + 0.5 * torch.randn(t.shape, generator=generator) for t in targets)


def batches(task: str, seed: int) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield detector_batch(generator) if task == "detector" else shapes(16, 32, generator)


def mean_iou(model: nn.Module, data: Iterator[tuple[Tensor, ...]], count: int = 8) -> float:
    hits = torch.zeros(CLASSES, CLASSES)
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            images, labels = next(data)
            _, found = model(images, labels)
            hits += torch.bincount((labels * CLASSES + found).flatten(), minlength=CLASSES**2).view(CLASSES, CLASSES)
    model.train()
    return float((hits.diag() / (hits.sum(0) + hits.sum(1) - hits.diag())).mean())


def head_losses(model: nn.Module, count: int = 32) -> list[float]:
    """Losses on 2,048 images nobody trained on; 0.25 of each is noise."""
    generator = torch.Generator().manual_seed(1000)
    model.eval()
    with torch.no_grad():
        found = torch.stack([model(*detector_batch(generator, 64))[1] for _ in range(count)]).mean(0)
    model.train()
    return found.tolist()  # type: ignore[no-any-return]


def softmax_row(backend: fxprec.Backend) -> dict[str, float] | None:
    """The cast of the gradient behind the softmax: the first one of the backward pass, at the logits."""
    rows = [r for r in backend.stats() if r["kind"] == "grad_output" and r["module"] == "out"]
    return rows[0] if rows else None


def train(task: str, side: str, steps: int, seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    torch._dynamo.reset()
    model: nn.Module = Detector() if task == "detector" else Segmenter()
    backend, function = None, model
    if side != "fp32":
        backend = fxprec.Backend(fxprec.Config(recipe="fp16", storage="simulate", grad_scaling=SIDES[side]))
        function = torch.compile(model, backend=backend)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, eps=1e-20)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses, underflows, start = [], [], time.perf_counter()
    data = batches(task, seed)
    for step in range(steps):
        loss, _ = function(*next(data))
        loss.backward()
        if backend is not None and step >= steps // 2 and step % 10 == 0:
            row = softmax_row(backend)
            underflows.append(row["underflow_ratio"] if row else None)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    result: dict[str, object] = {"side": side, "seconds": round(time.perf_counter() - start, 1)}
    if task == "detector":
        result["head_losses"] = head_losses(model)
    else:
        result["loss"] = MICRO_BATCHES * statistics.fmean(losses[-steps // 5 :])
        result["mean_iou"] = mean_iou(model, batches(task, seed + 1000))
        result["softmax_underflow"] = statistics.fmean(u for u in underflows if u is not None) if underflows else None
    if backend is not None:
        result["skipped_steps"] = backend.skipped_steps
        found = [r["scale_exponent"] for r in backend.stats() if r["kind"] == "grad_output"]
        result["scale_exponents"] = [min(found), max(found)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("detector", "segmentation"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for side in args.sides:
        for seed in range(args.seeds):
            rows.append({"seed": seed} | train(args.task, side, args.steps, seed))
            print(rows[-1], flush=True)
    path = machine.save(f"scaling-{args.task}", {"arguments": vars(args), "sides": rows})
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
