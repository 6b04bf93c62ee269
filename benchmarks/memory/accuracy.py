"""Bytes saved for backward beside what is learned: digits and text of the demo, trained under each side.

Same seed: same weights, same batches. Bytes are what autograd keeps of the model's forward, whole storages, without the
parameters' own (`fxprec.demo.train.saved_for_backward`). Scores are of the uncompiled float32 module on data that it has
not seen. What is done is kept in the result file of the day, so a run may be stopped.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fxprec
from benchmarks import machine
from fxprec.demo import data
from fxprec.demo.tasks import TASKS, Task, cross_entropy
from fxprec.demo.train import saved_for_backward

NAME = "memory-accuracy"
STEPS = 2000
FLOAT32, AUTOCAST = "float32", "autocast"
SIDES: dict[str, str | None] = {
    FLOAT32: None,
    AUTOCAST: None,
    "fp8": "fp8",
    "fp8+int4": "fp8+int4",
    "fp8+int2": "fp8+int2",
}
"""The recipe of a side, or None for Inductor alone."""


@dataclass
class Run:
    """One training run."""

    task: str
    side: str
    seed: int
    steps: int
    saved: int
    """Bytes."""
    held_out: float
    """Cross-entropy in nats: an image, a character."""
    accuracy: float | None
    """Share of images told right; None of text."""
    training: float
    """Mean loss of the last tenth of the steps."""
    promotions: int
    seconds: float
    """Of the processor, without the first step, which compiles."""


def run(seeds: int, steps: int, sides: Sequence[str], tasks: Sequence[str]) -> None:
    """Train what is not in today's result file; print a table."""
    torch.set_num_threads(1)
    runs = _done()
    for seed in range(seeds):
        for name in tasks:
            for side in sides:
                if not any((r.task, r.side, r.seed, r.steps) == (name, side, seed, steps) for r in runs):
                    runs.append(train(TASKS[name](steps=steps), side, seed))
                    print("  ".join(f"{key} {value}" for key, value in asdict(runs[-1]).items()), flush=True)
                    machine.save(NAME, [asdict(r) for r in runs])
    print("\n".join(table(runs)))


def _done() -> list[Run]:
    path = machine.RESULTS / f"{datetime.date.today().isoformat()}-{NAME}.json"
    return [Run(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def train(task: Task, side: str, seed: int) -> Run:
    """Train from ``seed``, evaluate, and count what one forward saves."""
    torch.compiler.reset()
    torch.manual_seed(seed)
    model = task.make_model()
    backend = None if SIDES[side] is None else fxprec.Backend(fxprec.Config(recipe=SIDES[side]))  # type: ignore[arg-type]
    compiled = torch.compile(model, backend=backend or "inductor")
    autocast: Callable[[], Any] = contextlib.nullcontext
    if side == AUTOCAST:
        autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.learning_rate, total_steps=task.steps + 1)
    losses, batches, start = [], task.batches(seed), 0.0
    for _ in range(task.steps):
        inputs, targets = next(batches)
        with autocast():
            predicted = compiled(inputs)
        loss = cross_entropy(predicted, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
        start = start or time.process_time()
    seconds = time.process_time() - start
    with autocast(), saved_for_backward(model) as saved:
        compiled(next(batches)[0])
    held_out, accuracy = _scores(task, model.eval())
    promotions = sum(e.kind == "promotion" for e in backend.events) if backend is not None else 0
    last = statistics.mean(losses[-max(1, task.steps // 10) :])
    return Run(
        task.name, side, seed, task.steps, sum(saved.values()), held_out, accuracy, last, promotions, round(seconds, 1)
    )


@torch.no_grad()
def _scores(task: Task, model: nn.Module) -> tuple[float, float | None]:
    if task.metric == "loss":
        return task.evaluate(model), None
    digits = data.load_digits()
    predicted: Tensor = model(digits.test_images)
    return float(cross_entropy(predicted, digits.test_labels)), task.evaluate(model)


def table(runs: Sequence[Run]) -> list[str]:
    """Return a line a task and side: bytes beside float32's, loss held out beside autocast's at the same seeds."""
    lines = []
    by = {(r.task, r.side, r.seed): r for r in runs}
    for task, side in dict.fromkeys((r.task, r.side) for r in runs):
        found = [r for r in runs if (r.task, r.side) == (task, side)]
        whole = by.get((task, FLOAT32, found[0].seed))
        text = f"{task:6} {side:9} saved {found[0].saved / 1e6:6.3f} MB"
        text += f" ({found[0].saved / whole.saved:.3f}x of float32)" if whole is not None else ""
        text += f", held out {statistics.mean(r.held_out for r in found):.4f}"
        apart = [r.held_out - by[task, AUTOCAST, r.seed].held_out for r in found if (task, AUTOCAST, r.seed) in by]
        text += f" ({', '.join(f'{x:+.4f}' for x in apart)} from autocast)" if apart else ""
        if task == "digits":
            text += f", accuracy {', '.join(f'{r.accuracy:.2%}' for r in found if r.accuracy is not None)}"
        lines.append(text)
    return lines
