"""Measure a tensor against its float64 reference: error, SQNR, and a sketch that a golden file can store."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fxprec.testing.case import Tensors

SKETCH = 4  # projections; a change of relative size d moves each by about d times a standard normal


@dataclass(frozen=True)
class Measured:
    """One tensor of a step against float64. Errors are relative: L2 of the difference over L2 of the reference."""

    name: str
    numel: int
    norm: float
    """L2 norm of the float64 reference."""
    error: float
    reference_error: float
    """The error of the reference precision."""
    gain: float
    """<tensor, reference> / <reference, reference>: 1 unless there is a bias."""
    sketch: tuple[float, ...]
    """Projections of the tensor on random signs, divided by the scale of the reference."""

    @property
    def sqnr(self) -> float:
        """Return the signal-to-quantisation-noise ratio in dB."""
        return decibels(self.error)

    @property
    def reference_sqnr(self) -> float:
        """Return the reference precision's signal-to-quantisation-noise ratio in dB."""
        return decibels(self.reference_error)


def decibels(error: float) -> float:
    """Return -20 log10 of a relative error: inf for an error of 0, -inf for one that is not finite."""
    if not math.isfinite(error):
        return -math.inf
    return -20 * math.log10(error) if error > 0 else math.inf


def measure(found: Tensors, exact: Tensors, yardstick: Tensors) -> list[Measured]:
    """Measure each tensor of ``exact``. A tensor that is missing in ``found``, or has another shape, has error inf."""
    return [_measure(name, found.get(name), tensor, yardstick.get(name)) for name, tensor in exact.items()]


def _measure(name: str, found: Tensor | None, exact: Tensor, yardstick: Tensor | None) -> Measured:
    norm = float(exact.norm())
    errors = [_error(t, exact, norm) for t in (found, yardstick)]
    # If a gradient is zero in theory, its reference is rounding noise; then the error in bfloat16 gives its scale.
    scale = max(norm, errors[1] * (norm or 1.0) if math.isfinite(errors[1]) else 0.0) or 1.0
    usable = found is not None and found.shape == exact.shape and bool(found.isfinite().all())
    gain, sketch = math.nan, (math.nan,) * SKETCH
    if usable and found is not None:
        gain = float((found * exact).sum()) / scale**2 if norm else 0.0
        sketch = tuple(float((found * sign).sum()) / scale for sign in _signs(name, exact))
    return Measured(name, exact.numel(), norm, errors[0], errors[1], gain, sketch)


def _error(found: Tensor | None, exact: Tensor, norm: float) -> float:
    if found is None or found.shape != exact.shape:
        return math.inf
    difference = float((found - exact).norm())
    return difference / (norm or 1.0) if math.isfinite(difference) else math.inf


def _signs(name: str, like: Tensor) -> Iterable[Tensor]:
    """Yield `SKETCH` tensors of +1 and -1, the same for the same name and shape."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    for _ in range(SKETCH):
        yield torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8, device="cpu").double() * 2 - 1
