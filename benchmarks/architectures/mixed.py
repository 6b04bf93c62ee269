"""One architecture as a trainer runs it: under autocast, with dropout, a loss that is scaled, an evaluation between steps.

Random numbers are eager torch's (``fallback_random``), so that every side draws the same masks. The exact gradient is that
of float32 without autocast, by torch's own AOTAutograd, and autocast's error is that of the same backend under autocast.

**near** stores nearly exact formats: losses must be those of autocast, and gradients no further from autocast's than these
are from exact ones (a difference of 2^-18 rounds some numbers of backward to the bfloat16 beside). **bf16** may be ``TIMES`` as far off as
autocast. **fp8** may be off by that, and twice by what fp8 is off without autocast. Every cast must be in the format of
its row of the plan.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
from torch import Tensor, nn

import fxprec
from benchmarks.architectures.registry import Buildable
from benchmarks.architectures.training import PLAIN, Row, _dense, built
from benchmarks.graphs.check import NEAR, in_a_line
from benchmarks.yardsticks.whole import Numbers, errors
from fxprec.ir.symbolic import Quantize
from fxprec.passes import pipeline

DROPOUT, SCALE, STEPS = 0.1, 2.0**8, 2
TIMES, LEAST, NEAR_BOUND = 3.0, 2.0**-8, 2e-3
SIDES: dict[str, dict[str, Any]] = {
    "near": {"recipe": NEAR, "storage": "packed", "low_ratio": 1.0},
    "bf16": {"recipe": "bf16"},
    "fp8": {"recipe": "fp8", "low_ratio": 1.0},
}
ALONE = "fp8 without autocast"
DECOMPOSED = "aot_eager_decomp_partition"


def turn_dropout_on(model: nn.Module) -> int:
    """Give every dropout of a model's modules and configurations its probability; return how many there are."""
    found = 0
    for part in model.modules():
        for owner in (part, getattr(part, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                is_dropout = ("drop" in name and "layer" not in name) or (isinstance(part, nn.Dropout) and name == "p")
                if is_dropout and isinstance(value, float) and value == 0.0:
                    setattr(owner, name, DROPOUT)
                    found += 1
    return found


@dataclass(frozen=True)
class Stepped:
    """Of each step the loss and the gradients, float64, and the loss of the evaluation after the first step."""

    steps: list[Numbers]
    evaluated: float
    casts: list[str] = field(default_factory=list)
    """Casts in another format than their row's."""


def trained(architecture: Buildable, backend: Any, autocast: bool, checkpoint: bool) -> Stepped:
    """Take ``STEPS`` steps of a compiled model, each from the same weights. Raises what the model raises."""
    torch._dynamo.reset()
    model, loss_of = built(architecture)
    turn_dropout_on(model)
    if checkpoint:
        model.gradient_checkpointing_enable()
    compiled = torch.compile(model, backend=backend)
    steps, evaluated = [], 0.0
    works: list[Any] = []
    with mock.patch.object(pipeline, "run", _recording(works)):
        for step in range(STEPS):
            steps.append(_step(model, lambda: loss_of(compiled), autocast))
            if step == 0:
                evaluated = _evaluation(model, lambda: loss_of(compiled), autocast)
    return Stepped(steps, evaluated, [said for work in works for said in misfits(work)])


def _step(model: nn.Module, loss_of: Callable[[], Tensor], autocast: bool) -> Numbers:
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = loss_of()
    (loss * SCALE).backward()
    gradients = {n: _dense(p.grad) / SCALE for n, p in model.named_parameters() if p.grad is not None}
    return Numbers([loss.detach().double()], gradients)


def _evaluation(model: nn.Module, loss_of: Callable[[], Tensor], autocast: bool) -> float:
    model.eval()
    torch.manual_seed(1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = float(loss_of())
    model.train()
    return loss


def _recording(works: list[Any]) -> Callable[..., Any]:
    run = pipeline.run

    def recording(work: Any, *args: Any) -> Any:
        works.append(work)
        return run(work, *args)

    return recording


def misfits(work: Any) -> list[str]:
    """Return the casts of a planned graph whose format is not that of their row of the plan."""
    sites = work.book.sites if work.plan is None else work.plan.sites
    site_of = {} if work.scales is None else work.scales.site_of
    found = []
    for q, cast in Quantize.among(Quantize.nodes(work.joint.graph)):
        site = sites[site_of.get(cast.row, cast.row)]
        if str(cast.format) not in (site.format, site.saved_as):
            found.append(f"{q.name} of {site.tensor} is in {cast.format}, and its row says {site.format}")
    return found


def measure(name: str, architecture: Buildable, sides: list[str], checkpoint: bool = False) -> list[Row]:
    """Return a row a side, or one of the backend of torch's that fails as well."""
    with warnings.catch_warnings(), torch._inductor.config.patch(fallback_random=True):
        warnings.simplefilter("ignore")
        try:
            exact = trained(architecture, DECOMPOSED, False, checkpoint)
            autocast = trained(architecture, DECOMPOSED, True, checkpoint)
        except Exception as error:
            return [Row(name, PLAIN, "eager", error=in_a_line(error))]
        rows = [Row(name, "autocast", "eager", gradient_errors=_gradients(autocast, exact))]
        alone = None
        for side in sides:
            row, start = Row(name, side, "eager"), time.perf_counter()
            try:
                options = {"lowering": "eager", **SIDES[side]}
                if side == "fp8":
                    alone = trained(architecture, _backend(options), False, checkpoint)
                backend = _backend(options)
                found = trained(architecture, backend, True, checkpoint)
                row.graphs = len(backend.plans)
                row.error = _missed(row, found, exact, autocast, alone)
            except Exception as error:
                row.error = in_a_line(error)
            row.seconds = round(time.perf_counter() - start, 2)
            rows.append(row)
    return rows


def _backend(options: dict[str, Any]) -> fxprec.Backend:
    return fxprec.Backend(fxprec.Config.from_options(options))


def _gradients(found: Stepped, exact: Stepped) -> list[float]:
    return [errors(f, e)[1] for f, e in zip(found.steps, exact.steps, strict=True)]


def _losses(found: Stepped, exact: Stepped) -> float:
    pairs = [(found.evaluated, exact.evaluated)]
    pairs += [(float(f.outputs[0]), float(e.outputs[0])) for f, e in zip(found.steps, exact.steps, strict=True)]
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)


def _missed(row: Row, found: Stepped, exact: Stepped, autocast: Stepped, alone: Stepped | None) -> str | None:
    row.losses = [float(step.outputs[0]) for step in found.steps]
    wanted = autocast if row.side == "near" else exact
    row.gradient_errors = _gradients(found, wanted)
    losses, gradients = _losses(found, wanted), row.gradient_errors[-1]
    of_autocast = max(LEAST, *_gradients(autocast, exact))
    bound = of_autocast if row.side == "near" else TIMES * of_autocast
    of_losses = NEAR_BOUND if row.side == "near" else TIMES * max(LEAST, _losses(autocast, exact))
    if alone is not None and row.side == "fp8":
        bound += 2 * _gradients(alone, exact)[-1]
        found.casts.extend(f"without autocast {said}" for said in alone.casts)
    if found.casts:
        return f"{len(found.casts)} casts: {found.casts[0]}"
    if not gradients <= bound:
        return f"a gradient is off by {gradients:.3g}, at most {bound:.3g}"
    return None if losses <= of_losses else f"a loss is off by {losses:.3g}, at most {of_losses:.3g}"
