"""Compare a short training run's loss curve with a band from several seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxprec.config import Config
from fxprec.config.checks import options_of
from fxprec.errors import ConfigError, GoldenError, NumericsError
from fxprec.plan.lines import aligned
from fxprec.report.result import plain
from fxprec.testing import golden as goldens
from fxprec.testing.case import Case, Compiled, quiet

Batches = Callable[[int], Any] | Sequence[Any]
"""Maps a step to ``(inputs, target)``, or to the inputs if the model returns its loss."""
TargetLoss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

MARGIN = 0.5  # of the band's own width, on either side, since five seeds do not show the whole spread
LEAST = 0.005  # of the loss, if the seeds agree
SCHEMA = 1


@dataclass(frozen=True)
class Curve:
    """Losses by step, their band, and the steps at which they leave it."""

    losses: list[float]
    low: list[float]
    high: list[float]
    wrote: Path | None = None
    outside: list[int] = field(init=False)

    def __post_init__(self) -> None:
        inside = (lo <= x <= hi for x, lo, hi in zip(self.losses, self.low, self.high, strict=True))
        object.__setattr__(self, "outside", [step for step, ok in enumerate(inside) if not ok])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {name: plain(getattr(self, name)) for name in ("losses", "low", "high")}

    def raise_if_wrong(self) -> None:
        """Raise `NumericsError` with the steps furthest outside the band."""
        if not self.outside:
            return
        lines = [("step", "loss", "band")]
        lines += [
            (str(i), f"{self.losses[i]:.5g}", f"{self.low[i]:.5g} to {self.high[i]:.5g}") for i in self._furthest()
        ]
        raise NumericsError(
            f"loss outside the band at {len(self.outside)} of {len(self.losses)} steps\n{aligned(lines)}"
        )

    def _furthest(self) -> list[int]:
        def distance(i: int) -> float:
            x = self.losses[i]
            return max(self.low[i] - x, x - self.high[i]) if math.isfinite(x) else math.inf

        return sorted(sorted(self.outside, key=distance, reverse=True)[:10])


def verify_training(
    factory: Callable[[], object],
    batches: Batches,
    *,
    steps: int = 20,
    seeds: int = 5,
    options: Mapping[str, object] | None = None,
    loss: TargetLoss | None = None,
    optimizer: MakeOptimizer | None = None,
    golden: Path,
    update: bool = False,
) -> Curve:
    """Train ``factory()``'s model from seed 0 and compare its loss, step by step, with the band stored in ``golden``.

    The band covers runs from seeds 0 to ``seeds - 1``, which give the factory other weights, and half its width on
    either side. It is written if the file is missing or ``update`` is set. ``batches`` maps a step to ``(inputs,
    target)``, or is a sequence of such pairs that is repeated. ``loss(output, target)`` is a scalar; without it the
    model returns the loss, and batches are inputs alone. ``optimizer`` maps parameters to an optimizer, by default SGD
    at 0.1.

    Raises `ConfigError` and `GoldenError`; wrong numbers raise nothing.
    """
    if steps < 1 or seeds < 2:
        raise ConfigError(f"steps is {steps} and seeds {seeds}; give at least 1 step and 2 seeds")
    config = Config.from_options({"lowering": "eager", **options_of(options)})
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    stored = _load(golden, steps) if golden.exists() and not update else None
    curves = []
    for seed in range(seeds if stored is None else 1):
        curves.append(_train(factory, batches, steps, config, loss, make, seed))
    if stored is not None:
        return Curve(curves[0], *stored)
    low, high = _band(curves)
    if not all(map(math.isfinite, (*low, *high))):
        raise ConfigError("the loss is not finite in training, so there is no band; lower the learning rate")
    _save(golden, low, high, seeds)
    return Curve(curves[0], low, high, golden)


def _train(
    factory: Callable[[], object],
    batches: Batches,
    steps: int,
    config: Config,
    loss: TargetLoss | None,
    make: MakeOptimizer,
    seed: int,
) -> list[float]:
    case = Case.make(factory, (), seed=seed)
    compiled = Compiled(case, config)
    optimizer = make(compiled.model.parameters())
    losses = []
    for step in range(steps):
        batch = batches(step) if callable(batches) else batches[step % len(batches)]
        inputs, target = (batch, None) if loss is None else batch
        with quiet():
            output = compiled(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))
            value = output if loss is None else loss(output, target)
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
    return losses


def _band(curves: list[list[float]]) -> tuple[list[float], list[float]]:
    low, high = [], []
    for values in zip(*curves, strict=True):
        room = max(MARGIN * (max(values) - min(values)), LEAST * max(map(abs, values)))
        low.append(float(f"{min(values) - room:.6g}"))
        high.append(float(f"{max(values) + room:.6g}"))
    return low, high


def _save(path: Path, low: list[float], high: list[float], seeds: int) -> None:
    data = {"schema": SCHEMA, "kind": "training", "seeds": seeds, "low": low, "high": high}
    goldens.write_text(path, "{\n " + ",\n ".join(f'"{k}": {json.dumps(v)}' for k, v in data.items()) + "\n}\n")


def _load(path: Path, steps: int) -> tuple[list[float], list[float]]:
    with goldens.reading(path):
        data = goldens.read_json(path, SCHEMA)
        bands = []
        for name in ("low", "high"):
            band = data.get(name)
            if not isinstance(band, list) or not all(type(x) in (int, float) and math.isfinite(x) for x in band):
                raise GoldenError(f"{name} is not a list of numbers")
            if len(band) != steps:
                raise GoldenError(f"{name} has {len(band)} steps, and the test trains {steps}")
            bands.append([float(x) for x in band])
    return bands[0], bands[1]
