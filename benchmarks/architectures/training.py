"""One architecture under one side: three steps of training, before the last of which tensors are promoted.

Sides: ``near``, formats that keep 18 mantissa bits and so must give float32's losses and gradients; ``fp8`` and
``hfp8`` (packed), which must train.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn

import fxprec
from benchmarks.architectures.registry import Buildable
from benchmarks.fidelity.one_step import cosine
from benchmarks.graphs.check import NEAR, in_a_line, promote_all
from benchmarks.graphs.values import Noise
from benchmarks.planned import said_by
from fxprec.passes.choose_crossings import WHY_RECOMPUTED

STEPS, RATE = 3, 1e-3
PLAIN = "aot_eager"
SIDES: dict[str, dict[str, Any]] = {
    "near": {"recipe": NEAR, "storage": "packed", "low_ratio": 1.0},
    "fp8": {"recipe": "fp8", "low_ratio": 1.0},
    "hfp8": {"recipe": "hfp8", "storage": "packed", "low_ratio": 1.0},
}
NEAR_BOUND, LOW_COSINE, LOW_LOSS = 1e-4, 0.9, 0.05
"""Of ``near``: relative error of the whole gradient and of the loss, in every step. Of 8 bits: the worst cosine
of a step's gradient, relative error of the losses. What noise of the format's size explains ten times is let pass."""
UNITS = {"near": 2.0**-19, "fp8": 2.0**-4, "hfp8": 2.0**-4}


@dataclass
class Row:
    """One architecture under one side."""

    architecture: str
    side: str
    lowering: str
    losses: list[float] = field(default_factory=list)
    gradient_errors: list[float] = field(default_factory=list)
    """|g - g32| / |g32| of all gradients in one vector, each step against float32's own training."""
    cosine: float | None = None
    """Of all gradients in one vector, the worst of the steps."""
    explained: float | None = None
    """Relative error of the gradient that noise of the format's size gives; only where it was asked for."""
    promoted: int = 0
    computed_again: int = 0
    """Tensors of which no low copy is stored, since computing them again takes less time."""
    graphs: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    """What was raised, or which bound was missed."""


@dataclass(frozen=True)
class Trained:
    """Losses and gradients of each step, float64."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


def train(model: nn.Module, loss_of: Callable[[], Tensor], before_last: Callable[[], object] = lambda: None) -> Trained:
    """Take plain gradient steps; they are small, so that two trainings stay together."""
    losses, gradients = [], []
    for step in range(STEPS):
        if step == STEPS - 1:
            before_last()
        torch.manual_seed(1)
        model.zero_grad()
        loss = loss_of()
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({n: _dense(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.add_(p.grad.to_dense() if p.grad.is_sparse else p.grad, alpha=-RATE)
    return Trained(losses, gradients)


def _dense(gradient: Tensor) -> Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().double().clone()


def built(architecture: Buildable) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return the model and its loss, the same each time."""
    torch.manual_seed(0)
    return architecture.build()


def reference(architecture: Buildable, noise: AbstractContextManager[Any] | None = None) -> Trained:
    """Train in float32, uncompiled."""
    model, loss_of = built(architecture)
    with noise or nullcontext():
        return train(model, lambda: loss_of(model))


def measure(name: str, architecture: Buildable, side: str, wanted: Trained, lowering: str = "eager") -> Row:
    """Train under a side and compare; whatever is raised is the row's ``error``."""
    row, start = Row(name, side, lowering), time.perf_counter()
    try:
        with warnings.catch_warnings(), torch._inductor.config.patch(fallback_random=True):
            warnings.simplefilter("ignore")
            trained = _train_compiled(row, architecture)
        _compare(row, wanted, trained)
        if side != PLAIN:
            row.error = _missed(row, wanted, architecture)
    except Exception as error:  # a row of its own; the others run
        row.error = in_a_line(error)
    row.seconds = round(time.perf_counter() - start, 2)
    return row


def _train_compiled(row: Row, architecture: Buildable) -> Trained:
    torch._dynamo.reset()
    model, loss_of = built(architecture)
    if row.side == PLAIN:
        plain = torch.compile(model, backend=PLAIN)
        return train(model, lambda: loss_of(plain))
    backend = fxprec.Backend(fxprec.Config.from_options(SIDES[row.side] | {"lowering": row.lowering}))
    compiled = torch.compile(model, backend=backend)
    trained = train(model, lambda: loss_of(compiled), lambda: promote_all(backend))
    row.promoted = sum(len(plan.promoted) for plan in backend.plans)
    row.computed_again = sum(site.why == WHY_RECOMPUTED for plan in backend.plans for site in plan.sites)
    row.graphs = len(backend.plans)
    row.notes = said_by(backend)
    return trained


def _compare(row: Row, wanted: Trained, found: Trained) -> None:
    row.losses = found.losses
    for a, b in zip(wanted.gradients, found.gradients, strict=True):
        if missing := a.keys() ^ b.keys():
            raise RuntimeError(f"other parameters have gradients than in float32: {', '.join(sorted(missing))[:200]}")
        row.gradient_errors.append(relative_error(a, b))
        vectors = (torch.cat([g.flatten() for _, g in sorted(t.items())]) for t in (a, b))
        row.cosine = min(cosine(*vectors), 1.0 if row.cosine is None else row.cosine)


def relative_error(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Return |found - wanted| / |wanted| over all tensors; infinite where a number is none."""
    apart = math.sqrt(sum(float((found[name] - x).square().sum()) for name, x in wanted.items()))
    size = math.sqrt(sum(float(x.square().sum()) for x in wanted.values()))
    return apart / max(size, 1e-30) if math.isfinite(apart) else math.inf


def _missed(row: Row, wanted: Trained, architecture: Buildable) -> str | None:
    """Return which bound a training missed, unless noise explains it."""
    losses = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(row.losses, wanted.losses, strict=True))
    gradients = max(row.gradient_errors)
    assert row.cosine is not None
    if not row.promoted and not row.computed_again:
        return "no tensor is held low, so that none was promoted"
    if not math.isfinite(losses) or not math.isfinite(gradients):
        return "a loss or a gradient is no number"
    if row.side == "near":
        missed = gradients > NEAR_BOUND or losses > NEAR_BOUND
    else:
        missed = row.cosine < LOW_COSINE or losses > LOW_LOSS
    if not missed:
        return None
    noisy = [reference(architecture, Noise(UNITS[row.side], seed)) for seed in range(2)]
    errors = [relative_error(a, b) for t in noisy for a, b in zip(wanted.gradients, t.gradients, strict=True)]
    row.explained = max(errors)
    apart = max(abs(a - b) / max(abs(b), 1e-3) for t in noisy for a, b in zip(t.losses, wanted.losses, strict=True))
    if gradients <= 10 * row.explained and losses <= max(10 * apart, 1e-6):
        return None
    return f"gradient off by {gradients:.2g} (noise explains {row.explained:.2g}), losses by {losses:.2g} ({apart:.2g})"
