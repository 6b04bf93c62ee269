"""One training step of one architecture: loss and gradient of a side against the float32 module."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch._inductor.config
from torch import Tensor, nn

import fxprec
from benchmarks.fidelity.architectures import ARCHITECTURES
from benchmarks.fidelity.sides import compile_side

LEAST_NORM = 1e-4
"""Parameters whose gradient has less of the whole's norm have no cosine of their own: a key's bias has rounding alone."""


@dataclass
class Row:
    """One side on one architecture; errors are relative to the float32 module's loss and gradient."""

    architecture: str
    side: str
    loss_error: float | None = None
    cosine: float | None = None
    """Of all gradients in one vector."""
    gradient_error: float | None = None
    """|g - g32| / |g32| of the same vectors."""
    worst_cosine: float | None = None
    """Of a single parameter's gradient."""
    worst_parameter: str = ""
    saved_ratio: float | None = None
    """Bytes saved for backward / the same in float32, by the plans."""
    graphs: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    """Fallbacks and code left uncompiled: what the figures above do not measure."""
    error: str | None = None
    """First line of what was raised."""


@dataclass(frozen=True)
class Step:
    """What one step gave."""

    loss: float
    gradients: dict[str, Tensor]
    """float64, by name of the parameter."""


def float32_step(architecture: str) -> Step:
    """Take the float32 module's step. Raises what the library does, and RuntimeError where a second step differs."""
    first, second = (_step(*_built(architecture)) for _ in range(2))
    if first.loss != second.loss:
        raise RuntimeError(f"two float32 steps differ, losses {first.loss} and {second.loss}; nothing to compare with")
    return first


def measure(architecture: str, side: str, reference: Step | Exception, lowering: str) -> Row:
    """Compile, take one step and compare. Whatever is raised is the row's ``error``.

    Random numbers are eager PyTorch's: those that Inductor makes itself are others, and hashed attention draws its
    hash functions.
    """
    row, start = Row(architecture, side), time.perf_counter()
    try:
        if isinstance(reference, Exception):
            raise reference
        model, loss_of = _built(architecture)
        compiled = compile_side(side, model, lowering)
        with torch._inductor.config.patch(fallback_random=True):
            _compare(row, reference, _step(model, lambda _: compiled.forward(loss_of)))
        if compiled.backend is not None:
            _describe(row, compiled.backend)
    except Exception as error:  # a row of its own; the others run
        row.error = first_line(error)
    row.seconds = round(time.perf_counter() - start, 2)
    return row


def first_line(error: BaseException) -> str:
    """Return the error in one line, without Dynamo's wrapping."""
    error = getattr(error, "inner_exception", error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _built(architecture: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    torch.manual_seed(0)
    return ARCHITECTURES[architecture].build()


def _step(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Step:
    torch.manual_seed(1)
    loss = loss_of(model)
    loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return Step(float(loss.detach()), gradients)


def _compare(row: Row, reference: Step, step: Step) -> None:
    if missing := reference.gradients.keys() ^ step.gradients.keys():
        raise RuntimeError(f"other parameters have gradients than in float32: {', '.join(sorted(missing))}")
    row.loss_error = abs(step.loss - reference.loss) / abs(reference.loss)
    pairs = [(g, step.gradients[name]) for name, g in reference.gradients.items()]
    wanted, got = (torch.cat([pair[i].flatten() for pair in pairs]) for i in range(2))
    row.cosine = cosine(wanted, got)
    norm = float(wanted.norm())
    row.gradient_error = float((got - wanted).norm()) / norm
    counted = {name: g for name, g in reference.gradients.items() if float(g.norm()) > LEAST_NORM * norm}
    cosines = {name: cosine(g, step.gradients[name]) for name, g in counted.items()}
    row.worst_parameter = min(cosines, key=lambda name: cosines[name])
    row.worst_cosine = cosines[row.worst_parameter]


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of two float64 tensors; 0 where one is zero or not finite, so that the worst is found."""
    found = float(a.flatten() @ b.flatten()) / max(float(a.norm()) * float(b.norm()), 1e-300)
    return found if math.isfinite(found) else 0.0


def _describe(row: Row, backend: fxprec.Backend) -> None:
    row.graphs = len(backend.plans)
    counts = [plan.saved_bytes for plan in backend.plans if plan.saved_bytes is not None]
    if wide := sum(count.fp32 for count in counts):
        row.saved_ratio = sum(count.planned for count in counts) / wide
    row.notes = [
        f"{event.kind}: {event.detail}"
        for event in backend.events
        if event.kind in ("fallback", "unplanned", "uncompiled", "promotion")
    ]
