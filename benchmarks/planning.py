"""How long planning a ``peak_budget`` takes: transformers of 2 to 24 layers, three budgets, nothing lowered or run.

    python -m benchmarks.planning
    python -m benchmarks.planning --cpu avx2                     # as for a CPU without 16-bit GEMMs
    python -m benchmarks.planning --layers 6 12 --budgets 30%

Seconds are of CPU. Tracing, and the passes before the search, are counted apart from planning.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from typing import Any
from unittest import mock

import torch

from benchmarks import machine
from fxprec import Backend, Config
from fxprec.config.settings import PeakBudget
from fxprec.demo.models import CharTransformer
from fxprec.errors import BudgetError
from fxprec.passes import choose_crossings
from fxprec.passes.crossings import problem
from fxprec.passes.crossings.effort import Effort

LAYERS, BUDGETS = (2, 4, 6, 12, 24), ("60%", "30%", "1%")


class Planned(Exception):
    """Ends a compilation once a graph is planned."""


def measure(layers: int, budget: str, cpu: str) -> dict[str, Any]:
    """Plan one network for one budget."""
    torch.compiler.reset()
    row: dict[str, Any] = {"layers": layers, "budget": budget, "cpu": cpu}
    efforts: dict[int, Effort] = {}
    solve, solved, begin = problem.Problem.solve, choose_crossings.within_budget, time.process_time()

    def counted(self: problem.Problem, *args: Any) -> Any:
        efforts[id(self)] = self.effort
        return solve(self, *args)

    def timed(work: Any, needs: Any, asked: PeakBudget, progress: Any) -> Any:
        start = time.process_time()
        row["traced_s"] = round(start - begin, 1)
        try:
            _, peak = solved(work, needs, asked, progress)
            row["planned"], row["of"] = peak.planned, peak.high
        except BudgetError as error:
            row["out_of_reach"] = str(error).partition(";")[0]
        row["planning_s"] = round(time.process_time() - start, 1)
        raise Planned

    model = CharTransformer(vocab=96, context=256, layers=layers, heads=8, width=256)
    backend = Backend(Config(recipe="fp8", lowering="eager", peak_budget=budget, cpu=cpu))
    with (
        mock.patch.object(problem.Problem, "solve", counted),
        mock.patch.object(choose_crossings, "within_budget", timed),
    ):
        try:
            torch.compile(model, backend=backend)(torch.randint(0, 96, (8, 256)))
        except Exception:
            if "planning_s" not in row:
                raise
    row["searches"] = sum(effort.searches for effort in efforts.values())
    row["nodes"] = sum(effort.nodes for effort in efforts.values())
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=LAYERS)
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--cpu", default="avx512+bf16", help="the processor to plan for")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    rows = [measure(layers, budget, args.cpu) for layers in args.layers for budget in args.budgets]
    print(machine.save(f"planning-{args.cpu}", rows))


if __name__ == "__main__":
    main()
