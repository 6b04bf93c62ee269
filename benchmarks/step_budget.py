"""Peak of a whole training step with AdamW, weights and optimizer states counted.

    python -m benchmarks.step_budget            # the transformer of docs/memory.md; keeps the result
    python -m benchmarks.step_budget --network resnet18   # or unet, llama: the sides of `THREE`
    python -m benchmarks.step_budget --clipping           # what gradients held for clipping add to the transformer
    python -m benchmarks.step_budget --accumulating       # a step after four backward passes
    python -m benchmarks.step_budget --side "fxprec fp8, optimizer"   # one row, in this process, as JSON

The peak is of live bytes, by the allocator's events, over forward, backward and ``optimizer.step()``; the bytes of
weights and states lie there before. Each row runs in a process of its own. The best that can be put together by hand
needs torchao: its AdamW8bit, stepped from a hook at each parameter. Batch norms keep float32 where weights are bf16.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fxprec
from benchmarks import machine
from benchmarks.memory.measure import peak_bytes
from benchmarks.memory.networks import network

STEPS = 7
RATE = 1e-4


@dataclass(frozen=True)
class Side:
    """How one row trains; without options under torch's autocast."""

    options: Mapping[str, Any] | None = None
    checkpointed: bool = False
    in_backward: bool = False
    weights: torch.dtype = torch.float32
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"update": "nearest"})
    """Options of fxprec's AdamW."""
    torchao: Mapping[str, Any] | None = None
    """Options of torchao's AdamW8bit, in place of fxprec's."""
    passes: int = 1
    """Backward passes before each step. With one, torchao's optimizer steps each parameter from a hook."""

    @property
    def steps_in_hooks(self) -> bool:
        return self.torchao is not None and self.passes == 1


_FP8 = {"recipe": "fp8", "allocator": "compact"}
_30 = {**_FP8, "peak_budget": "30%"}
_23 = {**_FP8, "peak_budget": "23%"}  # of bf16 weights
_8BIT = {"update": "nearest", "states": "8bit"}
_ALL = {"update": "stochastic", "states": "8bit"}
_LAST = {**_ALL, "max_norm": 1.0, "norm": "last"}
_EXACT = {**_ALL, "max_norm": 1.0, "norm": "exact"}
_OPEN = {"update": "stochastic", "states": "auto"}
BUDGETS = {"transformer": "33MB", "resnet18": "25MB", "unet": "9.5MB", "llama": "40MB"}
"""Of the whole step, with weights in bf16."""
THREE = (
    "autocast, checkpointed",
    "autocast, checkpointed, torchao AdamW8bit in hooks",
    "fxprec fp8, step budget, bf16 weights",
)
CLIPPING = (
    "fxprec fp8, checkpointed, optimizer, 8-bit states, bf16 weights",
    "the same, clipped by the last norm",
    "the same, clipped by the exact norm",
)
_SUMMED = {**_ALL, "gradients": "bf16"}
ACCUMULATING = {
    "autocast, checkpointed": Side(checkpointed=True, passes=4),
    "the same, torchao AdamW8bit": Side(checkpointed=True, torchao={}, passes=4),
    "the same, bf16 weights rounded stochastically": Side(
        None, True, False, torch.bfloat16, torchao={"bf16_stochastic_round": True}, passes=4
    ),
    "fxprec fp8, peak 30%, optimizer, 8-bit states, gradients in bf16": Side(
        _30, in_backward=True, optimizer={**_8BIT, "gradients": "bf16"}, passes=4
    ),
    "the same, bf16 weights": Side(_23, False, True, torch.bfloat16, _SUMMED, passes=4),
}
SIDES = {
    "autocast, checkpointed": Side(checkpointed=True),
    "autocast, checkpointed, torchao AdamW8bit in hooks": Side(checkpointed=True, torchao={}),
    "fxprec fp8": Side(_FP8),
    "fxprec fp8, optimizer": Side(_FP8, in_backward=True),
    "fxprec fp8, peak 30%": Side(_30),
    "fxprec fp8, peak 30%, optimizer": Side(_30, in_backward=True),
    "fxprec fp8, checkpointed, optimizer": Side(_FP8, True, True),
    "fxprec fp8, checkpointed, optimizer, 8-bit states": Side(_FP8, True, True, optimizer=_8BIT),
    "fxprec fp8, checkpointed, optimizer, 8-bit states, bf16 weights": Side(_FP8, True, True, torch.bfloat16, _ALL),
    "the same, clipped by the last norm": Side(_FP8, True, True, torch.bfloat16, _LAST),
    "the same, clipped by the exact norm": Side(_FP8, True, True, torch.bfloat16, _EXACT),
    "fxprec fp8, peak 30%, optimizer, 8-bit states": Side(_30, in_backward=True, optimizer=_8BIT),
    "fxprec fp8, peak 23%, optimizer, 8-bit states, bf16 weights": Side(_23, False, True, torch.bfloat16, _ALL),
    "the same, 4-bit states": Side(_23, False, True, torch.bfloat16, {**_ALL, "states": "4bit"}),
    "fxprec fp8, step budget, bf16 weights": Side({**_FP8, "step_budget": ""}, False, True, torch.bfloat16, _OPEN),
}


def measure(name: str, of: str, budget: str | None = None, *, accumulating: bool = False) -> dict[str, Any]:
    """Return one row of a network; MB are 10^6 bytes."""
    torch.set_num_threads(1)
    side = ACCUMULATING[name] if accumulating else SIDES[name]
    found = network(of)
    model = found.model(checkpointed=side.checkpointed).to(side.weights)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    if found.inputs.is_floating_point():
        found = replace(found, inputs=found.inputs.to(side.weights))
    optimizers = [_ours(model, side)] if side.torchao is None else _torchao(model, side)
    if side.options is None:
        compiled = torch.compile(model)
    else:
        options = dict(side.options) | ({"optimizer": optimizers[0]} if side.in_backward else {})
        if "step_budget" in options:
            options["step_budget"] = budget or BUDGETS[of]
        compiled = torch.compile(model, backend="fxprec", options=options)
    step = _step(lambda: found.loss(compiled), side, optimizers)

    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.process_time()
        losses.append(step())
        seconds.append(time.process_time() - start)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step()
    weights = sum(p.nbytes for p in model.parameters())
    states = sum(_bytes(t) for o in optimizers for s in o.state.values() for t in s.values())
    peak = peak_bytes(profiled)
    return {
        "network": of,
        "side": name,
        "peak_mb": round(peak / 1e6, 1),
        "weights_mb": round(weights / 1e6, 1),
        "states_in": sorted({group.get("states") or "" for group in optimizers[0].param_groups})[0],
        "states_mb": round(states / 1e6, 1),
        "whole_step_mb": round((peak + weights + states) / 1e6, 1),
        "step_ms": round(1e3 * statistics.median(seconds[2:]), 1),
        "loss": [losses[0], losses[-1]],
    }


def _ours(model: nn.Module, side: Side) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.dtype == dtype]} for dtype in dict.fromkeys(p.dtype for p in params)]
    return fxprec.optim.AdamW(groups, lr=RATE, **side.optimizer)


def _torchao(model: nn.Module, side: Side) -> list[torch.optim.Optimizer]:
    from torchao.optim import AdamW8bit

    options = {"lr": RATE, **(side.torchao or {})}
    if not side.steps_in_hooks:
        return [AdamW8bit(model.parameters(), **options)]

    def stepping(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return hook

    optimizers = []
    for p in model.parameters():
        optimizers.append(AdamW8bit([p], **options))
        p.register_post_accumulate_grad_hook(stepping(optimizers[-1]))
    return optimizers


def _step(loss_of: Callable[[], Tensor], side: Side, optimizers: list[torch.optim.Optimizer]) -> Callable[[], float]:
    def step() -> float:
        for _ in range(side.passes):
            with torch.autocast("cpu", torch.bfloat16, enabled=side.options is None):
                loss = loss_of()
            (loss / side.passes).backward()
        for optimizer in optimizers if not side.steps_in_hooks else ():
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.item())

    return step


def _bytes(t: object) -> int:
    """Return the bytes of a state, of torchao's those of its parts."""
    if not isinstance(t, Tensor):
        return 0
    parts = getattr(t, "tensor_attrs", ())
    return sum(getattr(t, part).nbytes for part in parts) if parts else t.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=BUDGETS, default="transformer")
    parser.add_argument("--side", choices=dict.fromkeys([*SIDES, *ACCUMULATING]))
    parser.add_argument("--clipping", action="store_true")
    parser.add_argument("--accumulating", action="store_true")
    parser.add_argument("--budget", help="In place of the network's own, for a side with a step budget.")
    asked = parser.parse_args()
    if asked.side:
        print(json.dumps(measure(asked.side, asked.network, asked.budget, accumulating=asked.accumulating)))
        return
    rows = []
    kept, every = _rows(asked)
    for name in every:
        command = [sys.executable, "-m", "benchmarks.step_budget", "--network", asked.network, "--side", name]
        command += ["--accumulating"] if asked.accumulating else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    machine.save(kept, rows)


def _rows(asked: argparse.Namespace) -> tuple[str, Iterable[str]]:
    """Return the name of the result that is kept, and its sides."""
    if asked.clipping:
        return "step-budget-clipping", CLIPPING
    if asked.accumulating:
        return "step-budget-accumulating", ACCUMULATING
    return ("step-budget", SIDES) if asked.network == "transformer" else (f"step-budget-{asked.network}", THREE)


if __name__ == "__main__":
    main()
