"""Budgets and what is measured under them: each of the six networks at ten shares of its peak with everything kept.

A share that no plan reaches is a row, too. What is done is kept in the result file of the day, so a run may be stopped.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile

import fxprec
from benchmarks import machine
from benchmarks.memory.measure import Step, live_peak
from benchmarks.memory.networks import PREDICTED
from benchmarks.memory.sides import Side

SHARES = tuple(range(75, 25, -5))
"""From what the plan without a budget meets in most networks to what none meets."""
NAME = "memory-budgets"


def run() -> None:
    """Measure the pairs that are not in today's result file."""
    torch.set_num_threads(1)
    rows = _done()
    for share in SHARES:
        for name in PREDICTED:
            if not any(row["network"] == name and row["share"] == share for row in rows):
                rows.append({"network": name, "share": share, **measure(name, share)})
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
                machine.save(NAME, rows)
    print(summary(rows))


def _done() -> list[dict[str, Any]]:
    path = machine.RESULTS / f"{datetime.date.today().isoformat()}-{NAME}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []  # type: ignore[no-any-return]


@contextlib.contextmanager
def loops_left_out() -> Iterator[None]:
    """Have Inductor write its C++ loops and not compile them: they allocate nothing, and take most of the time.

    All else is real: the code that allocates and frees, the libraries' kernels, autograd, the allocator. Places that a
    loop would write, and a library reads, are 0.
    """

    def nothing(self: AsyncCompile, *_: Any) -> Any:
        return lambda *_: None

    def zeros(self: AsyncCompile, types: Sequence[str], *_: Any) -> Any:
        written = [i for i, kind in enumerate(types) if kind == "int64_t*"]

        def run(*args: Any) -> None:
            for i in written:
                args[i].zero_()

        return run

    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", zeros),
        mock.patch.object(AsyncCompile, "cpp", nothing),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        yield


def measure(name: str, share: int) -> dict[str, Any]:
    """Return the bytes of one pair. ``tried``: of each plan made for it, what it predicts and holds as compiled."""
    torch._dynamo.reset()
    with loops_left_out():
        step = Step(name, Side({"recipe": "fp8", "peak_budget": f"{share}%"}))
        assert step.backend is not None
        try:
            step()
        except fxprec.BudgetError as error:
            return {"out_of_reach": str(error)}
        step()  # Dynamo may compile once more in the second
        measured = live_peak(step)
    peak = step.backend.plans[0].peak_bytes
    assert peak is not None
    tried = [list(pair) for pair in step.backend._graphs[0].compiler.peak.tried]
    return {"budget": peak.budget, "high": peak.high, "tried": tried, "measured": measured}


def summary(rows: list[dict[str, Any]]) -> str:
    """Return how many budgets were kept, and how far predictions were from what is measured."""
    held = [row for row in rows if "measured" in row]
    kept = sum(row["measured"] <= row["budget"] for row in held)
    first = [abs(row["tried"][0][0] / row["tried"][0][1] - 1) for row in held]
    last = [abs(row["tried"][-1][1] / row["measured"] - 1) for row in held]
    return (
        f"{kept} of {len(held)} budgets kept, {len(rows) - len(held)} out of reach; first plans predict what they hold as "
        f"compiled within {max(first, default=0):.1%}, {sum(e <= 0.05 for e in first)} of them within 5%; the code of "
        f"compiled graphs says what is measured within {max(last, default=0):.1%}"
    )
