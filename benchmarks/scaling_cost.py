"""What carrying scales costs a training step: the same model with and without, in turn.

    python -m benchmarks.scaling_cost --batch 8 --width 1
    OMP_NUM_THREADS=1 python -m benchmarks.scaling_cost --of copies --recipe fp8 --storage native

Steady steps and steps that measure are timed apart; with a refresh every 100 steps the second kind counts for 1 %.
``--of copies``: scales of what forward stores, which measure nothing more. One thread is timed by its processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch
import torch._inductor.config
from torch import nn

import fxprec
from benchmarks import machine
from benchmarks.step import make
from fxprec.passes.scale_copies import ScaleCopies

WARM_UP = 12  # scales have settled by then


def _without_copies() -> AbstractContextManager[object]:
    """Compile without scales of copies."""
    return mock.patch.object(ScaleCopies, "apply", return_value=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("transformer", "resnet18"), default="transformer")
    parser.add_argument("--of", choices=("gradients", "copies"), default="gradients")
    parser.add_argument("--recipe", default="hfp8")
    parser.add_argument("--storage", default="packed")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    warnings.simplefilter("ignore", fxprec.FxprecWarning)
    torch._inductor.config.force_disable_caches = True  # a side left out by a patch is in no key
    factory, loss = make(args.model, args.batch, args.width, args.sequence)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    sides = {}
    for scaling in ("none", "auto"):
        torch.manual_seed(0)
        model: nn.Module = factory()
        of_gradients = scaling if args.of == "gradients" else "auto"
        backend = fxprec.Backend(fxprec.Config(recipe=args.recipe, storage=args.storage, grad_scaling=of_gradients))
        sides[scaling] = (model, torch.compile(model, backend=backend), backend)
        with _without_copies() if (args.of, scaling) == ("copies", "none") else nullcontext():
            loss(sides[scaling][1]).backward()

    def step(scaling: str) -> float:
        model, compiled, _ = sides[scaling]
        model.zero_grad(set_to_none=True)
        begin = clock()
        loss(compiled).backward()
        return 1e3 * (clock() - begin)

    for _ in range(WARM_UP):
        for scaling in sides:
            step(scaling)
    steady: dict[str, list[float]] = {"none": [], "auto": []}
    for _ in range(args.steps):
        for scaling in sides:
            steady[scaling].append(round(step(scaling), 2))
    measuring = []
    scaled = sides["auto"][2]
    for _ in range(5 if args.of == "gradients" else 0):
        scaled.refresh_scales()
        measuring.append(round(step("auto"), 2))
    none, auto, measured = (statistics.median(x) for x in (steady["none"], steady["auto"], measuring or steady["auto"]))
    paired = statistics.median(b / a for a, b in zip(steady["none"], steady["auto"], strict=True)) - 1
    result = {
        "arguments": vars(args),
        "casts": sum(row["kind"] == ("output", "grad_output")[args.of == "gradients"] for row in scaled.stats()),
        "none_ms": none,
        "auto_ms": auto,
        "measuring_ms": measured,
        "steady_cost": round(auto / none - 1, 4),
        "steady_cost_paired": round(paired, 4),
        "cost_with_refresh_every_100": round((0.99 * auto + 0.01 * measured) / none - 1, 4),
        "steps_ms": steady,
        "measuring_steps_ms": measuring,
    }
    of = "" if args.of == "gradients" else f"{args.of}-"
    path = machine.save(f"scaling-cost-{of}{args.model}-{args.recipe}-{args.storage}", result)
    print({k: v for k, v in result.items() if "steps" not in k}, f"written to {path.name}")


if __name__ == "__main__":
    main()
