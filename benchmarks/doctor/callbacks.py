"""What `fxprec.log_to` costs beside a training step: process time of the callback over that of the steps."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import fxprec
from benchmarks.doctor.networks import Language

EVERY, STEPS, WARM = 100, 210, 3
ALERTS = (("*", "overflow_ratio > 0.1"), ("*", "underflow_ratio > 0.9"))


class Nowhere:
    """Takes what TensorBoard's writer does, and keeps none of it."""

    def add_scalar(self, *values: Any) -> None:
        pass


def measure(layers: int, width: int) -> dict[str, Any]:
    """Train 8 x 128 tokens with every tensor logged, two alerts on all of them, and the loss watched."""
    torch.manual_seed(0)
    model, tokens = Language(layers, width), torch.randint(0, 64, (8, 128))
    call = torch.compile(model, backend="fxprec", options={"recipe": "fp8"})
    log = fxprec.log_to(Nowhere(), every=EVERY, every_tensor=True, alerts=ALERTS)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    steps, logs = list[float](), list[float]()
    for i in range(STEPS):
        start = time.process_time()
        loss = F.cross_entropy(call(tokens).flatten(0, -2).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done = time.process_time()
        log(call, loss)
        if i >= WARM:
            steps.append(done - start)
            logs.append(time.process_time() - done)
    found = {
        "layers": layers, "width": width, "steps": len(steps), "sites": len(fxprec.backend_of(call).plans[0].sites),
        "step_ms": 1e3 * median(steps), "callback_ms": 1e3 * median(logs), "callback_ms_most": 1e3 * max(logs),
        "share": sum(logs) / sum(steps),
    }  # fmt: skip
    print(found)
    return found
