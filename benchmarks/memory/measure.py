"""One row: peak by the allocator's events, resident memory, processor time of a step, loss."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import fxprec
from benchmarks.memory.networks import network
from benchmarks.memory.sides import SIDES, Side, offloading
from fxprec.compat import allocated_peak
from fxprec.compat import peak_bytes as peak_bytes
from fxprec.runtime.cpu import compact

STEPS = 9
RATE = 0.05


class Step:
    """A training step of one side; the optimizer's update is no part of what is measured."""

    def __init__(self, name: str, side: Side) -> None:
        self.network, self.side = network(name), side
        self.model = self.network.model(checkpointed=self.side.checkpointed)
        options = self.side.options
        self.backend = None if options is None else fxprec.Backend(fxprec.Config.from_options(options))
        self.compiled = torch.compile(self.model, backend=self.backend or "inductor")
        self.kept = frozenset(t.untyped_storage().data_ptr() for t in self._there_anyway())

    def _there_anyway(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers(), self.network.inputs, self.network.targets]

    def __call__(self) -> float:
        """Forward and backward; return the loss."""
        saving = offloading(self.kept) if self.side.offloads else contextlib.nullcontext()
        with self.side.compiling(), saving:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.side.autocast):
                loss = self.network.loss(self.compiled)
            loss.backward()
        return loss.item()

    def update(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=RATE)

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)
        gc.collect()


def measure(name: str, side: str) -> dict[str, Any]:
    """Return one row; MB are 10^6 bytes and count what one step allocates, parameter gradients included."""
    torch.set_num_threads(1)
    step = Step(name, SIDES[side])
    losses = [step()]
    similar = cosine(step, name)
    step.clear()
    ctypes.CDLL(None).malloc_trim(0)
    compact.trim()
    resident = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    seconds = []
    for _ in range(STEPS):
        start = time.process_time()
        losses.append(step())
        seconds.append(time.process_time() - start)
        step.update()
        step.model.zero_grad(set_to_none=True)
    resident = _status("VmHWM") - resident
    peak = live_peak(step)
    saved = None if step.backend is None else step.backend.plans[0].saved_bytes
    return {
        "network": name,
        "shape": step.network.shape,
        "side": side,
        "peak_mb": round(peak / 1e6, 1),
        "resident_mb": round(resident, 1),
        "step_ms": round(1e3 * statistics.median(seconds), 1),
        "loss": [losses[0], losses[-1]],
        "cosine": similar,
        "saved_mb": None if saved is None else round(saved.planned / 1e6, 1),
        "gradients_mb": round(sum(p.nbytes for p in step.model.parameters()) / 1e6, 1),
    }


def live_peak(step: Step) -> int:
    """Return the most bytes live at once that one step allocates."""
    step.clear()
    return allocated_peak(step)


def cosine(step: Step, name: str) -> float:
    """Return the cosine between all gradients of the first step and those in float32, uncompiled."""
    plain = network(name)
    model = plain.model(checkpointed=False)
    plain.loss(model).backward()
    found = torch.cat([p.grad.flatten() for p in step.model.parameters() if p.grad is not None])
    wanted = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    similar = torch.nn.functional.cosine_similarity(found.double(), wanted.double(), dim=0).item()
    return similar if math.isfinite(similar) else math.nan


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(name))
