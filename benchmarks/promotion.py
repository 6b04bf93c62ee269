"""The paper's four CNNs trained on scanned digits: how much of the low precision does promotion take back?

    python -m benchmarks.promotion

8x8 scans are enlarged to 3x32x32. One row per network: share of elements low at the start and promoted at the end,
loss and test accuracy beside float32's from the same seed.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from benchmarks import machine
from examples.models.mobilenet import mobilenet_v2
from examples.models.resnet import resnet18
from examples.models.shufflenet import shufflenet_v2
from examples.models.squeezenet import squeezenet
from fxprec.demo.data import Digits, load_digits

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "squeezenet": squeezenet,
    "shufflenet_v2": shufflenet_v2,
    "mobilenet_v2": mobilenet_v2,
    "resnet18": resnet18,
}


def enlarged(images: Tensor) -> Tensor:
    """Turn ``(batch, 1, 8, 8)`` in 0..1 into ``(batch, 3, 32, 32)`` of mean about 0 and deviation about 1."""
    return (F.interpolate(images, scale_factor=4, mode="bilinear").expand(-1, 3, -1, -1) - 0.3) / 0.37


def batches(digits: Digits, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(digits.train_labels), (size,), generator=generator)
        yield enlarged(digits.train_images[chosen]), digits.train_labels[chosen]


def train(
    make: Callable[..., nn.Module], digits: Digits, args: argparse.Namespace, low: float | None
) -> dict[str, Any]:
    """Train from seed 0 in float32 (``low`` None) or hfp8 with that ratio; return the figures as plain data."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make(num_classes=10, width=args.width)
    backend = None
    if low is not None:
        options = fxprec.Config(recipe="hfp8", low_ratio=low, storage=args.storage)
        backend = fxprec.Backend(options)
    compiled = torch.compile(model, backend=backend or "inductor")
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    source = batches(digits, args.batch, seed=0)
    losses = []
    for _ in range(args.steps):
        images, labels = next(source)
        loss = F.cross_entropy(compiled(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        right = (model(enlarged(digits.test_images)).argmax(1) == digits.test_labels).float().mean()
    figures = {"loss": round(sum(losses[-10:]) / 10, 4), "accuracy": round(float(right), 4)}
    if backend is not None:
        plan = backend.plans[0]
        promoted_at = sorted(e.step for e in backend.events if e.kind == "promotion")
        figures |= {
            "low_ratio": round(plan.achieved_low_ratio, 4),
            "promoted_ratio": round(plan.promoted_ratio, 5),
            "promoted_tensors": len(plan.promoted),
            "promoted_at_steps": promoted_at,
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--low", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--storage", choices=("simulate", "packed"), default="simulate")
    parser.add_argument("--width", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    warnings.simplefilter("ignore", fxprec.FxprecWarning)
    digits, rows = load_digits(), []
    for name in args.networks:
        for low in (None, *args.low):
            row = {"network": name, "asked": low} | train(NETWORKS[name], digits, args, low)
            print(row, flush=True)
            rows.append(row)
    print(f"written to {machine.save('promotion', {'arguments': vars(args), 'runs': rows}).name}")


if __name__ == "__main__":
    main()
