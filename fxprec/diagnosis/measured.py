"""Measure training steps of a model as torch compiles them and as fxprec does: memory, time, the first loss."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxprec.compat import allocated_peak
from fxprec.config import Config
from fxprec.diagnosis.subject import Subject
from fxprec.driver.backend import Backend

INDUCTOR, AUTOCAST = "inductor", "autocast"
SIDES = (INDUCTOR, AUTOCAST, "bf16", "fp8")


@dataclass(frozen=True)
class Measured:
    """What one side's training steps take."""

    side: str
    peak_bytes: int
    """Most bytes live at once that a step allocates: activations, temporaries and parameter gradients."""
    step_s: float
    """Median of the timed steps: forward, loss and backward."""
    first_s: float
    """The first step, which compiles."""
    saved_bytes: int | None
    """Bytes that fxprec's graphs save for backward; None for torch's sides."""
    loss: float
    gradient_norm: float
    """Loss of the first step, and the norm of all parameter gradients together."""


def check_side(side: str, options: Mapping[str, object]) -> Config | None:
    """Return the options of one of fxprec's sides, None for one of torch's. Raises `ConfigError`."""
    return None if side in (INDUCTOR, AUTOCAST) else Config.from_options({"recipe": side, **options})


def measure(subject: Subject, side: str, options: Mapping[str, object], steps: int) -> Measured:
    """Measure one side: ``"inductor"``, ``"autocast"`` in bfloat16, or the recipe of fxprec with this name.

    ``options`` are fxprec's further options. Raises `ConfigError`, and what compiling raises.
    """
    model = subject.fresh()
    device = next(model.parameters()).device
    config = check_side(side, options)
    backend = None if config is None else Backend(config)
    subject, call = _compiled(subject, model, backend, device, autocast=side == AUTOCAST)
    batch = subject.batch()

    def step() -> float:
        model.zero_grad(set_to_none=True)
        return subject.step(call, batch=batch)

    first_s, loss = _timed(step, device)
    norm = torch.stack([p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    step()  # Dynamo may compile once more in the second
    seconds = [_timed(step, device)[0] for _ in range(steps)]
    model.zero_grad(set_to_none=True)
    return Measured(
        side=side,
        peak_bytes=live_peak(step, device),
        step_s=statistics.median(seconds),
        first_s=first_s,
        saved_bytes=None if backend is None else sum(p.saved_bytes.planned for p in backend.plans if p.saved_bytes),
        loss=loss,
        gradient_norm=float(norm),
    )


def _compiled(
    subject: Subject, model: nn.Module, backend: Backend | None, device: torch.device, *, autocast: bool
) -> tuple[Subject, Callable[..., object]]:
    """Return the subject and the compiled model; with ``autocast`` its forward and its loss run under bf16 autocast."""
    compiled = torch.compile(model, backend="inductor" if backend is None else backend)

    def under(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: object, **kwargs: object) -> Any:
            with torch.autocast(device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
                return function(*args, **kwargs)

        return run

    return replace(subject, loss=under(subject.loss)), under(compiled)


def _timed(step: Callable[[], float], device: torch.device) -> tuple[float, float]:
    """Return the seconds of a step, its kernels on a GPU included, and its loss."""
    start = time.perf_counter()
    loss = step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, loss


def live_peak(step: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes of a device's memory, live at once, that a step allocates."""
    if device.type != "cuda":
        return allocated_peak(step)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
