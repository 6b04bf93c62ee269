"""What a yardstick's table has in a cell, the columns, and the criteria by which a cell passes (`op_db` explains them)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import fxprec
from benchmarks.graphs.check import NEAR

STEPS = 3  # scales of stored copies come from the statistics of earlier steps
TIMES, NOISE = 3.0, 30.0
BF16, E4M3FN = 2.0**-8, 2.0**-4
FLOAT32, NEARLY = 2.0**-20, 2.0**-17
OWN = 0.01  # float64 that is further from float32 is no reference
RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {"recipe": "fp32", "lowering": "inductor"},  # plain Inductor, to the bit
    "plain": {"recipe": "fp32"},
    "near": {"recipe": NEAR, "low_ratio": 1.0, "storage": "packed"},
    "bf16": {"recipe": "bf16"},
    "fp8": {"recipe": "fp8", "low_ratio": 1.0},
    "compiled": {"recipe": "fp8", "low_ratio": 1.0, "lowering": "inductor"},
}
BY_INDUCTOR = tuple(column for column, options in RECIPES.items() if options.get("lowering") == "inductor")
IN_8_BITS = ("fp8", "compiled")
BY_THE_REFERENCE = ("near", "bf16", "fp8")
TORCHS = {"aot": "aot_eager_decomp_partition", "inductor": "inductor"}
MIXED = "mixed"
OURS = (*RECIPES, MIXED)
COLUMNS = ("eager", "autocast", *TORCHS, *OURS)
PASSED, FAILED, REFUSED, LEFT_OUT, LATE = "passed", "failed", "refused", "left out", "late"
VERDICTS = (PASSED, FAILED, REFUSED, LEFT_OUT, LATE)


@dataclass
class Cell:
    """What one column has of one operator: its worst sample."""

    verdict: str = PASSED
    outputs: float = 0.0
    gradients: float = 0.0
    detail: str = ""
    first: list[float] = field(default_factory=list)
    """What outputs and gradients of the first step are off by; those above are the last step's."""
    note: str = ""

    def worse(self, other: Cell) -> Cell:
        order = (PASSED, LEFT_OUT, REFUSED, FAILED)
        return max(self, other, key=lambda cell: (order.index(cell.verdict), cell.gradients))


@dataclass
class Row:
    """One operator: how many samples were tried, and the cells by column."""

    operator: str
    samples: int = 0
    cells: dict[str, Cell] = field(default_factory=dict)
    left_out: str = ""
    late: str = ""
    """The limit that the row ran into. The columns without a cell did not end by then."""

    def add(self, column: str, cell: Cell) -> None:
        self.cells[column] = self.cells[column].worse(cell) if column in self.cells else cell


def bounds(column: str, float32: tuple[float, float], bf16: tuple[float, float]) -> tuple[float, float]:
    """Return how far off outputs, and gradients, may be, given plain torch's errors."""
    if column not in ("bf16", "fp8", "compiled"):
        unit = NEARLY if column == "near" else FLOAT32
        return NOISE * max(unit, float32[0]), NOISE * max(unit, float32[1])
    outputs, gradients = (TIMES * max(BF16, error) for error in bf16)
    return outputs, gradients + (0.0 if column == "bf16" else TIMES * E4M3FN)


def backend_of(column: str) -> Any:
    """Return what `torch.compile` is given for a column."""
    return TORCHS.get(column) or fxprec.Backend(fxprec.Config(**{"lowering": "eager", **RECIPES[column]}))


def against(steps: list[tuple[float, float]], bounds: tuple[float, float]) -> Cell:
    """Judge the last step by bounds of outputs and gradients; note what the first had, where it is beyond a bound."""
    first, last = _beyond(steps[0], bounds), _beyond(steps[-1], bounds)
    note = f"first step: {first}" if first and not last else ""
    return Cell(FAILED if last else PASSED, *steps[-1], last, list(steps[0]), note)


def _beyond(off: tuple[float, float], bounds: tuple[float, float]) -> str:
    for what, error, bound in zip(("an output", "a gradient"), off, bounds, strict=True):
        if not error <= bound:
            return f"{what} is off by {error:.3g}, at most {bound:.3g}"
    return ""
