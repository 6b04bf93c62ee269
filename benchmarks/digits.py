"""Test accuracy of the small CNN on the 8x8 digits, a recipe beside float32, over several seeds.

    python -m benchmarks.digits --seeds 3 --storage packed

The float32 module is evaluated, uncompiled, on the fixed test fifth. Same seed, same initial weights and batches.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from typing import Any

import fxprec
from benchmarks import machine
from fxprec.demo.tasks import digits_task
from fxprec.demo.train import Outcome, train


def row(side: str, seed: int, outcome: Outcome) -> dict[str, Any]:
    """Return one run's figures as plain data."""
    plan = outcome.plans[0] if outcome.plans else None
    return {
        "side": side,
        "seed": seed,
        "accuracy": round(outcome.score, 5),
        "low_ratio": None if plan is None else round(plan.achieved_low_ratio, 4),
        "promoted_ratio": None if plan is None else round(plan.promoted_ratio, 4),
        "promotions": outcome.promotions,
        "saved_kb": round(outcome.saved_bytes / 1e3, 1),
        "train_s": round(outcome.train_seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=330)
    parser.add_argument("--recipe", default="hfp8")
    parser.add_argument("--storage", default="packed")
    parser.add_argument("--low-ratio", type=float, default=0.5)
    args = parser.parse_args()
    warnings.simplefilter("ignore", fxprec.FxprecWarning)
    sides: dict[str, dict[str, Any]] = {
        "fp32": {"recipe": "fp32"},
        args.recipe: {"recipe": args.recipe, "storage": args.storage, "low_ratio": args.low_ratio},
    }
    rows = []
    for seed in range(args.seeds):
        for side, options in sides.items():
            task = digits_task(steps=args.steps)
            rows.append(row(side, seed, train(task, side, options, seed=seed, on_step=lambda step, loss: None)))
            print(*(f"{k} {v}" for k, v in rows[-1].items()), sep="  ", flush=True)
    means = {side: statistics.mean(r["accuracy"] for r in rows if r["side"] == side) for side in sides}
    points = 100 * (means[args.recipe] - means["fp32"])
    print(f"mean accuracy: {means}; {args.recipe} is {points:+.2f} points from fp32")
    path = machine.save(
        f"digits-{args.recipe}-{args.storage}", {"arguments": vars(args), "runs": rows, "points": points}
    )
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
