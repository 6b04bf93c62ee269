"""Training in fp16 under each way to scale gradients, all of them on one compiled graph; and the tasks that need it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from benchmarks.papers import images
from benchmarks.papers.sweep import compiled_beside, op_by_op
from examples.models.small_cnn import SmallCNN
from fxprec.config.grad_scaling import GradScaling, LossScaling
from fxprec.runtime.scaling.keeper import keeper_of

Scaling = GradScaling | LossScaling | None
FP32 = None
NONE = LossScaling(initial=1.0, dynamic=False)
FIXED = LossScaling(initial=128.0, dynamic=False)
DYNAMIC = LossScaling(growth_interval=25)  # the paper's runs are a hundred times as long
GRADIENT = GradScaling(interval=25)
Batch = tuple[Tensor, ...]


@dataclass
class Run:
    """What one training gave."""

    losses: list[float] = field(default_factory=list)
    """By step, without a scale."""
    skipped: int = 0
    """Steps left out since the loss scale overflowed."""
    underflow: dict[str, list[float]] = field(default_factory=dict)
    """Of each module's first incoming gradient (behind the softmax: of the logits), by step, share of its elements."""
    exponents: dict[str, list[int]] = field(default_factory=dict)
    """Scale exponents in the same way."""

    @property
    def loss(self) -> float:
        """Mean of the last fifth; NaN where it is not finite."""
        last = self.losses[-max(1, len(self.losses) // 5) :]
        mean = sum(last) / len(last)
        return mean if math.isfinite(mean) else math.nan


class Trainer:
    """A model that returns (loss, detail), compiled once in fp16, storage ``simulate``."""

    def __init__(self, make: Callable[[], nn.Module], batch: Batch) -> None:
        self.make, self.model = make, make()
        config = fxprec.Config(recipe="fp16", storage="simulate", grad_scaling=GRADIENT)
        self.backend = fxprec.Backend(config)
        self.compiled = compiled_beside(self.model, self.backend)
        with op_by_op():
            self.compiled(*batch)[0].backward()
        self._start = self.backend.controllers[0].state_dict() | {"step": 0}

    def train(self, scaling: Scaling, seed: int, batches: Iterator[Batch], steps: int, lr: float) -> Run:
        """Train with Adam, the rate falling along a cosine; leaves the trained weights in ``self.model``."""
        torch.manual_seed(seed)
        self.model.load_state_dict(self.make().state_dict())
        call = self.model if scaling is FP32 else self._begin(scaling)
        optimizer = torch.optim.Adam(self.model.parameters(), lr, eps=1e-20)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        run = Run()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = call(*next(batches))[0]
            loss.backward()
            run.losses.append(float(loss.detach()))
            if scaling is FP32 or self._is_good(scaling, run):
                optimizer.step()
            schedule.step()
        assert len(self.backend.controllers) == 1, "compiled again: the scaling was another graph's"
        return run

    def _begin(self, scaling: GradScaling | LossScaling) -> Callable[..., tuple[Tensor, Tensor]]:
        controller = self.backend.controllers[0]
        assert controller.keeper is not None
        graph = controller.keeper.graph
        controller.keeper = keeper_of(GRADIENT, graph, None)
        controller.load_state_dict(self._start)
        controller.keeper = keeper_of(scaling, graph, None)
        controller.latest.clear()
        return self.compiled

    def _is_good(self, scaling: Scaling, run: Run) -> bool:
        """Note the statistics of the step; say whether a dynamic loss scale allows it."""
        controller = self.backend.controllers[0]
        controller.act_on_all()
        met = set()
        for row in controller.rows():
            if row["kind"] == "grad_output" and row["underflow_ratio"] is not None and row["module"] not in met:
                met.add(row["module"])
                run.underflow.setdefault(row["module"], []).append(row["underflow_ratio"])
                run.exponents.setdefault(row["module"], []).append(row["scale_exponent"])
        is_bad = isinstance(scaling, LossScaling) and scaling.dynamic and bool(controller.keeper.overflowed)  # type: ignore[union-attr]
        run.skipped += is_bad
        return not is_bad


CLASSES = 4
MICRO_BATCHES = 253  # 12 images of 360 x 480 pixels, CamVid's batch, over 8 of 32 x 32
WEIGHTS = (1e3, 1.0, 1e-3, 1e-6)
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
    pictures = colors[labels].permute(0, 3, 1, 2)
    return pictures + 0.3 * torch.randn(pictures.shape, generator=generator), labels


def mean_iou(found: Tensor, labels: Tensor) -> float:
    """Intersection over union, mean over classes, in percent."""
    hits = torch.bincount((labels * CLASSES + found).flatten(), minlength=CLASSES**2).view(CLASSES, CLASSES).float()
    return 100 * float((hits.diag() / (hits.sum(0) + hits.sum(1) - hits.diag())).mean())


def _block(inside: int, out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


class Segmenter(nn.Module):
    """Two levels down, two up, skips added; a pixel-wise softmax whose loss is that of one of 253 micro-batches."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.one, self.two = _block(3, width), _block(width, 2 * width, 2)
        self.three = _block(2 * width, 4 * width, 2)
        self.up_two, self.up_one = _block(4 * width, 2 * width), _block(2 * width, width)
        self.out = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        one = self.one(x)
        two = self.two(one)
        up = self.up_two(F.interpolate(self.three(two), scale_factor=2.0)) + two
        logits = self.out(self.up_one(F.interpolate(up, scale_factor=2.0)) + one)
        return F.cross_entropy(logits, labels) / MICRO_BATCHES, logits.detach().argmax(1)


class Detector(nn.Module):
    """A backbone and four heads: how much of the image each class fills, and where each kind of shape lies."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Sequential(_block(3, width), _block(width, 2 * width, 2), _block(2 * width, 4 * width, 2))
        self.heads = nn.ModuleList(
            nn.Sequential(
                _block(4 * width, width), nn.AdaptiveAvgPool2d(GRID), nn.Flatten(), nn.Linear(GRID**2 * width, n)
            )
            for n in HEADS
        )

    def forward(self, x: Tensor, *targets: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(x)
        losses = torch.stack([F.mse_loss(h(features), t) for h, t in zip(self.heads, targets, strict=True)])
        return (losses * torch.tensor(WEIGHTS)).sum(), losses.detach()


class Classifier(nn.Module):
    """A network with its cross entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.network(x)
        return F.cross_entropy(logits, labels), logits.detach().argmax(1)


def detector_batch(generator: torch.Generator, count: int = 8) -> Batch:
    """Images; the share of each class in the image; for each kind its share in each cell. Noise of 0.5 is on all."""
    pictures, labels = shapes(count, 24, generator)
    present = F.one_hot(labels, CLASSES).permute(0, 3, 1, 2).float()
    cells = F.adaptive_avg_pool2d(present, GRID).flatten(2)
    targets = (20 * (cells.mean(2) - cells.new_tensor([0.85, 0.05, 0.05, 0.05])), *(5 * cells[:, 1:]).unbind(1))
    return pictures, *(t + 0.5 * torch.randn(t.shape, generator=generator) for t in targets)


def digit_batch(generator: torch.Generator, count: int = 32) -> Batch:
    """Digits of 8x8 pixels."""
    x, y, _, _ = images.digits(8, 1)
    pick = torch.randint(len(y), (count,), generator=generator)
    return x[pick], y[pick]


def segmentation_batch(generator: torch.Generator, count: int = 8) -> Batch:
    """Shapes in 32x32 pixels."""
    return shapes(count, 32, generator)


Draw = Callable[[torch.Generator], Batch]
TASKS: dict[str, tuple[Callable[[], nn.Module], Draw]] = {
    "detector": (Detector, detector_batch),
    "segmentation": (Segmenter, segmentation_batch),
    "resnet": (lambda: Classifier(SmallCNN(width=8)), digit_batch),
}


@cache
def trainer(task: str) -> Trainer:
    """The task's model, compiled once a process."""
    make, draw = TASKS[task]
    return Trainer(make, draw(torch.Generator().manual_seed(0)))


def batches(task: str, seed: int) -> Iterator[Batch]:
    """Batches without an end, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(TASKS[task][1], generator)
    while True:
        yield draw()


@cache
def trained(task: str, side: str, seed: int, steps: int, lr: float) -> tuple[Run, dict[str, Tensor]]:
    """A run and its weights: tables that look at the same training share it."""
    scaling: Scaling = {
        "float32": FP32,
        "none": NONE,
        "fixed 128": FIXED,
        "dynamic": DYNAMIC,
        "gradient": GRADIENT,
    }.get(side, NONE)
    if side.startswith("2^"):
        scaling = LossScaling(initial=2.0 ** int(side[2:]), dynamic=False)
    found = trainer(task)
    run = found.train(scaling, seed, batches(task, seed), steps, lr)
    return run, {name: value.clone() for name, value in found.model.state_dict().items()}


def with_weights(task: str, weights: dict[str, Tensor]) -> nn.Module:
    """A fresh model of the task with those weights, in float32."""
    model = TASKS[task][0]()
    model.load_state_dict(weights)
    return model
