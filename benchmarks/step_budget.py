"""Peak of a whole training step with AdamW, weights and optimizer states counted.

    python -m benchmarks.step_budget            # the transformer of docs/memory.md; keeps the result
    python -m benchmarks.step_budget --side "fxprec fp8, optimizer"   # one row, in this process, as JSON

The peak is of live bytes, by the allocator's events, over forward, backward and ``optimizer.step()``; the bytes of
weights and states lie there before. Each row runs in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fxprec
from benchmarks import machine
from benchmarks.memory.measure import peak_bytes
from benchmarks.memory.networks import network

NETWORK = "transformer"
STEPS = 7
_FP8 = {"recipe": "fp8", "allocator": "compact"}
SIDES: dict[str, Mapping[str, Any] | None] = {
    "autocast, checkpointed": None,
    "fxprec fp8": _FP8,
    "fxprec fp8, optimizer": {**_FP8, "optimizer": True},
    "fxprec fp8, peak 30%": {**_FP8, "peak_budget": "30%"},
    "fxprec fp8, peak 30%, optimizer": {**_FP8, "peak_budget": "30%", "optimizer": True},
}


def measure(side: str) -> dict[str, Any]:
    """Return one row; MB are 10^6 bytes."""
    torch.set_num_threads(1)
    options = None if SIDES[side] is None else dict(SIDES[side])
    found = network(NETWORK)
    model = found.model(checkpointed=options is None)
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=1e-4, update="nearest")
    if options is None:
        compiled = torch.compile(model)
    else:
        if options.pop("optimizer", False):
            options["optimizer"] = optimizer
        compiled = torch.compile(model, backend="fxprec", options=options)

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=options is None):
            loss = found.loss(compiled)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.process_time()
        losses.append(step())
        seconds.append(time.process_time() - start)
        optimizer.zero_grad()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step()
    weights = sum(p.nbytes for p in model.parameters())
    states = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    peak = peak_bytes(profiled)
    return {
        "side": side,
        "peak_mb": round(peak / 1e6, 1),
        "weights_mb": round(weights / 1e6, 1),
        "states_mb": round(states / 1e6, 1),
        "whole_step_mb": round((peak + weights + states) / 1e6, 1),
        "step_ms": round(1e3 * statistics.median(seconds[2:]), 1),
        "loss": [losses[0], losses[-1]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES)
    side = parser.parse_args().side
    if side:
        print(json.dumps(measure(side)))
        return
    rows = []
    for side in SIDES:
        command = [sys.executable, "-m", "benchmarks.step_budget", "--side", side]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    machine.save("step-budget", rows)


if __name__ == "__main__":
    main()
