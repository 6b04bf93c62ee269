"""A short training: held-out loss of the float32 module after training under each side, over several seeds.

    python -m benchmarks.fidelity.training --seeds 3                # an hour and more on one core
    python -m benchmarks.fidelity.training --steps 20 --sides float32 "fp8 1 high"

A byte-level transformer (4 layers, width 192) on the sources of Python's library, AdamW with one cycle of learning
rate. The loss is compiled with the model. Same seed: same weights, same batches.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import fxprec
from benchmarks import machine
from benchmarks.fidelity.sides import AUTOCAST, FLOAT32, available, compile_side
from benchmarks.fidelity.sides import SIDES as OPTIONS
from fxprec.demo.models import CharTransformer
from fxprec.demo.tasks import Task, cross_entropy, text_task

BYTES, CONTEXT, BATCH = 256, 128, 16
SIDES = (FLOAT32, AUTOCAST, "bf16 high", "fp8 0.5 high", "fp8 1 high", "hfp8 packed 1 high")


@dataclass
class Run:
    """One training run."""

    side: str
    seed: int
    held_out: float
    """Nats a byte, of the uncompiled float32 module."""
    training: float
    """Nats a byte, mean of the last tenth of the steps."""
    promotions: int
    seconds: float
    """Without the first step, which compiles."""


class WithLoss(nn.Module):
    """A model and its cross-entropy in one module, so that one graph holds both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.model(inputs), targets)


def byte_task(steps: int) -> Task:
    """Return the task; its codes are below 256."""
    task = text_task(steps=steps, batch=BATCH, context=CONTEXT)
    return replace(
        task,
        make_model=lambda: CharTransformer(vocab=BYTES, context=CONTEXT, layers=4, width=192),
        learning_rate=2e-3,
    )


def train(
    task: Task,
    side: str,
    seed: int,
    lowering: str = "auto",
    sides: Mapping[str, dict[str, Any]] = MappingProxyType(OPTIONS),
) -> Run:
    """Train from ``seed`` and evaluate; ``sides`` are fxprec's options by name."""
    torch.manual_seed(seed)
    model = task.make_model()
    compiled = compile_side(side, WithLoss(model), lowering, sides)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.learning_rate, total_steps=task.steps + 1)
    losses, start = [], time.perf_counter()
    for i, (inputs, targets) in zip(range(task.steps), task.batches(seed), strict=False):
        loss = compiled.forward(lambda module, batch=(inputs, targets): module(*batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
        if i == 0:
            start = time.perf_counter()
        if (i + 1) % 20 == 0:
            print(f"{side}, seed {seed}: step {i + 1} of {task.steps}, loss {losses[-1]:.4f}", flush=True)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        held_out = task.evaluate(model.eval())
    last = statistics.mean(losses[-max(1, task.steps // 10) :])
    events = [] if compiled.backend is None else compiled.backend.events
    return Run(side, seed, held_out, last, sum(e.kind == "promotion" for e in events), round(seconds, 1))


def lines(runs: Sequence[Run], beside: str = AUTOCAST) -> list[str]:
    """Return a line a side: mean held-out loss, and how far from that of another side at the same seeds."""
    base = {run.seed: run.held_out for run in runs if run.side == beside}
    found = []
    for side in dict.fromkeys(run.side for run in runs):
        of_side = [run for run in runs if run.side == side]
        apart = [run.held_out - base[run.seed] for run in of_side if run.seed in base]
        text = f"{side:20} held-out loss {statistics.mean(run.held_out for run in of_side):.4f}"
        found.append(text + (f", {statistics.mean(apart):+.4f} from {beside}" if apart else ""))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sides", nargs="+", metavar="SIDE", choices=[FLOAT32, *available()], help=", ".join(SIDES))
    args = parser.parse_args()
    warnings.simplefilter("ignore", fxprec.FxprecWarning)
    torch.set_num_threads(1)
    sides = args.sides or [side for side in SIDES if side in (FLOAT32, *available())]
    runs: list[Run] = []
    for seed in range(args.seeds):
        for side in sides:
            runs.append(train(byte_task(args.steps), side, seed))
            print(*(f"{key} {value}" for key, value in asdict(runs[-1]).items()), sep="  ", flush=True)
            path = machine.save("fidelity-training", {"arguments": vars(args), "runs": [asdict(run) for run in runs]})
    print("\n".join(["", *lines(runs)]))
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
