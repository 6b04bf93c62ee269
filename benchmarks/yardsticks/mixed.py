"""An operator as a trainer runs it: under `torch.autocast`, beside AOTAutograd alone under the same autocast.

Copies keep 22 bits, as **near** of `benchmarks.architectures.mixed`: forward reads values, so outputs must be autocast's.
Gradients may differ by that file's bound. Every cast must have the format of its row of the plan. The middle sample is run,
one step under a fixed seed. What plain torch cannot run or differentiate to finite numbers is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.config

import fxprec
from benchmarks.architectures.mixed import NEAR_BOUND, PLAIN_TORCH, SAME_LOSS, SIDES
from benchmarks.graphs.check import in_a_line
from benchmarks.planned import misfits, recorded_works, said_by
from benchmarks.yardsticks import exercise
from benchmarks.yardsticks.cells import FAILED, LEFT_OUT, PASSED, REFUSED, Cell
from benchmarks.yardsticks.exercise import Exercised, Numbers


def judged(model: Exercised) -> Cell:
    """Run a sample by torch and by fxprec under autocast, with the same random numbers, and compare."""
    with torch._inductor.config.patch(fallback_random=True):
        try:
            wanted = _stepped(model, PLAIN_TORCH)
        except Exception as error:
            return Cell(LEFT_OUT, detail=f"torch alone: {in_a_line(error)}")
        if not wanted.is_finite:
            return Cell(LEFT_OUT, detail="torch alone: inf or NaN")
        backend = fxprec.Backend(fxprec.Config(lowering="eager", **SIDES["near"]))
        try:
            with recorded_works() as works:
                found = _stepped(model, backend)
        except Exception as error:
            inner = getattr(error, "inner_exception", error)
            return Cell(REFUSED if isinstance(inner, fxprec.errors.FxprecError) else FAILED, detail=in_a_line(error))
    if not works:
        return Cell(LEFT_OUT, detail="Dynamo compiles nothing of it")
    casts = [said for work in works for said in misfits(work)]
    cell = verdict(exercise.errors(found, wanted, model.values), casts)
    return replace(cell, note="; ".join(said_by(backend)[:1]))


def verdict(off: tuple[float, float], casts: list[str]) -> Cell:
    """Judge what outputs and gradients are off by, and casts in another format than their row's."""
    outputs, gradients = off
    if casts:
        return Cell(FAILED, outputs, gradients, casts[0])
    if not outputs <= SAME_LOSS:
        return Cell(FAILED, outputs, gradients, f"an output is off by {outputs:.3g}, at most {SAME_LOSS:.3g}")
    if not gradients <= NEAR_BOUND:
        return Cell(FAILED, outputs, gradients, f"a gradient is off by {gradients:.3g}, at most {NEAR_BOUND:.3g}")
    return Cell(PASSED, outputs, gradients)


def _stepped(model: Exercised, backend: Any) -> Numbers:
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, dynamic=False)

    def call(*values: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return compiled(*values)

    return exercise.step(model, call)
