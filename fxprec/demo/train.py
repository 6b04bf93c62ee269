"""The demo's training loop: plain PyTorch, compiled by fxprec, timed and measured."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxprec.demo.tasks import Task, cross_entropy
from fxprec.driver.named import backend_of
from fxprec.plan import Plan
from fxprec.runtime.events import Event

OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class Outcome:
    """The result of one training run."""

    task: str
    metric: str
    recipe: str
    score: float
    """``Task.evaluate`` of the uncompiled float32 module."""
    saved_bytes: int
    """Bytes saved for backward in one step (see `saved_for_backward`)."""
    compile_seconds: float
    """Seconds of the first step, which compiles."""
    train_seconds: float
    """Seconds of all steps after the first."""
    steps: int
    plans: tuple[Plan, ...]
    events: tuple[Event, ...]
    notices: tuple[str, ...]
    """Warnings raised during the run, each one line."""

    @property
    def promotions(self) -> int:
        """Number of tensors that left low precision while training."""
        return sum(e.kind == "promotion" for e in self.events)

    def low_ratio(self, which: str) -> float | None:
        """Return the ``"requested"`` or ``"achieved"`` share of low elements, over all plans; None without a plan."""
        ratios = [getattr(plan, f"{which}_low_ratio") for plan in self.plans]
        total = sum(plan.total_elements for plan in self.plans)
        if not total or None in ratios:
            return None
        return float(sum(r * plan.total_elements for r, plan in zip(ratios, self.plans, strict=True)) / total)


@contextmanager
def saved_for_backward(model: nn.Module) -> Iterator[dict[int, int]]:
    """Collect what autograd saves inside the block: bytes of whole storages, by address, without those of parameters.

    Inputs, low-precision copies of parameters and fxprec's own tables count, since they take memory too.
    """
    own, seen = {p.untyped_storage().data_ptr() for p in model.parameters()}, dict[int, int]()

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        yield seen


def train(task: Task, recipe: str, options: Mapping[str, Any], *, seed: int, on_step: OnStep) -> Outcome:
    """Train ``task`` from ``seed`` under ``options``, the fields of `Config`; ``recipe`` is the name in reports.

    ``on_step(step, loss)`` is called after each step. Raises what `Config` and the backend raise.
    """
    torch.compiler.reset()
    torch.manual_seed(seed)
    model = task.make_model()
    compiled = torch.compile(model, backend="fxprec", options=dict(options))
    backend = backend_of(compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.learning_rate, total_steps=task.steps + 1)
    batches = task.batches(seed)

    def step() -> float:
        inputs, targets = next(batches)
        loss = cross_entropy(compiled(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return float(loss.detach())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        on_step(1, step())
        compiled_at = time.perf_counter()
        for i in range(2, task.steps + 1):
            on_step(i, step())
        end = time.perf_counter()
        with saved_for_backward(model) as saved:
            compiled(next(batches)[0])
    model.eval()
    with torch.no_grad():
        score = task.evaluate(model)
    return Outcome(
        task=task.name,
        metric=task.metric,
        recipe=recipe,
        score=score,
        saved_bytes=sum(saved.values()),
        compile_seconds=compiled_at - start,
        train_seconds=end - compiled_at,
        steps=task.steps,
        plans=backend.plans,
        events=backend.events,
        notices=tuple(dict.fromkeys(" ".join(str(w.message).split()) for w in caught)),
    )
