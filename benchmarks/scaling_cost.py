"""What carrying scales costs a training step: the same model with and without, in turn.

    python -m benchmarks.scaling_cost --batch 8 --width 1

Steady steps and steps that measure are timed apart; with a refresh every 100 steps the second kind counts for 1 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
from torch import nn

import fxprec
from benchmarks import machine
from benchmarks.step import make

WARM_UP = 12  # scales have settled by then


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("transformer", "resnet18"), default="transformer")
    parser.add_argument("--recipe", default="hfp8")
    parser.add_argument("--storage", default="packed")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    warnings.simplefilter("ignore", fxprec.FxprecWarning)
    factory, loss = make(args.model, args.batch, args.width)
    sides = {}
    for scaling in ("none", "auto"):
        torch.manual_seed(0)
        model: nn.Module = factory()
        backend = fxprec.Backend(fxprec.Config(recipe=args.recipe, storage=args.storage, grad_scaling=scaling))
        sides[scaling] = (model, torch.compile(model, backend=backend), backend)

    def step(scaling: str) -> float:
        model, compiled, _ = sides[scaling]
        model.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        loss(compiled).backward()
        return 1e3 * (time.perf_counter() - begin)

    for _ in range(WARM_UP):
        for scaling in sides:
            step(scaling)
    steady: dict[str, list[float]] = {"none": [], "auto": []}
    for _ in range(args.steps):
        for scaling in sides:
            steady[scaling].append(round(step(scaling), 2))
    measuring = []
    scaled = sides["auto"][2]
    for _ in range(5):
        scaled.refresh_scales()
        measuring.append(round(step("auto"), 2))
    none, auto, measured = (statistics.median(x) for x in (steady["none"], steady["auto"], measuring))
    paired = statistics.median(b / a for a, b in zip(steady["none"], steady["auto"], strict=True)) - 1
    result = {
        "arguments": vars(args),
        "casts": sum(row["kind"] == "grad_output" for row in scaled.stats()),
        "none_ms": none,
        "auto_ms": auto,
        "measuring_ms": measured,
        "steady_cost": round(auto / none - 1, 4),
        "steady_cost_paired": round(paired, 4),
        "cost_with_refresh_every_100": round((0.99 * auto + 0.01 * measured) / none - 1, 4),
        "steps_ms": steady,
        "measuring_steps_ms": measuring,
    }
    path = machine.save(f"scaling-cost-{args.model}-{args.recipe}-{args.storage}", result)
    print({k: v for k, v in result.items() if "steps" not in k}, f"written to {path.name}")


if __name__ == "__main__":
    main()
