"""torch's op_db: every operator with float32 gradients, behind one Linear, in fxprec's recipes against float64.

A step (`exercise`) is forward and backward under a fixed seed; the loss is a random projection of all outputs. The third
of `STEPS` equal steps is judged, and the first is noted where it is beyond a bound. An error is relative, in the Euclidean norm; the largest of the outputs and the largest of the gradients are judged.

**fp32** is recipe fp32 through Inductor, **inductor** Inductor alone, **plain** recipe fp32 by the reference lowering, and **near** the
passes in formats of 18 and 22 mantissa bits, by the reference lowering. Criterion: the error is float32's noise, ``NOISE`` times plain torch's own in float32 or that many times the
format's rounding of a factor.

**bf16**: the error is at most ``TIMES`` that of `torch.autocast` in bfloat16 of the same module, or that many times
2^-8, the largest error of one number of 8 significant bits, where autocast happens to round nothing. Where autocast
raises, or ends in inf or NaN, plain float32 stands in for it with operands, results and saved tensors rounded to bfloat16.

**fp8** computes on unrounded values and rounds what it saves: outputs are judged like bf16's. A gradient may be off by
``TIMES`` the sum of two errors: autocast's, of the products in bfloat16 that both do; and 2^-4, the largest error of one
number of 4 significant bits, as e4m3fn has. A backward that is linear in what it reads is off by 2^-4 at most, by a
third of that on average (0.024: the mantissa uniform, rounding uniform in a step); so a formula may multiply its copy's
error by 3 in the worst case, by 8 on average. What multiplies it more is ill-conditioned, and must be stored in more
bits (``passes/analysis/sensitive.py``). **compiled** is fp8 through Inductor. **mixed** is a step under autocast
(`benchmarks/yardsticks/mixed.py`).

Operators that draw random numbers are compared with plain torch's float32 where float64 draws others. What plain torch
cannot differentiate to finite numbers is left out, as is what a backend of torch alone gets wrong too; both are named. A cell's note says where Dynamo breaks the
graph, so that the operator runs uncompiled.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

import fxprec
from benchmarks.graphs.check import in_a_line
from benchmarks.yardsticks import exercise, mixed
from benchmarks.yardsticks.cells import (
    BY_INDUCTOR,
    COLUMNS,
    FAILED,
    LEFT_OUT,
    MIXED,
    OWN,
    PASSED,
    REFUSED,
    STEPS,
    TORCHS,
    Cell,
    Row,
    against,
    backend_of,
    bounds,
)
from benchmarks.yardsticks.exercise import Exercised, Numbers


@dataclass(frozen=True)
class Reference:
    """The exact step of a sample, and what plain torch makes of it in fewer bits."""

    model: Exercised
    exact: Numbers
    float32: tuple[float, float]
    bf16: tuple[float, float]
    autocast: Cell

    @staticmethod
    def of(model: Exercised) -> Reference | None:
        """Return None where plain torch has no finite gradient to compare with."""
        plain, exact = exercise.step(model), exercise.step(model.widened())
        if any(a.shape != b.shape for a, b in zip(plain.all(), exact.all(), strict=True)):
            exact = plain
        own = exercise.errors(plain, exact, model.values)
        if max(own) > OWN:
            exact, own = plain, (0.0, 0.0)
        if not exact.is_finite:
            return None
        autocast = _autocast(model, exact)
        errors = (autocast.outputs, autocast.gradients)
        if autocast.verdict != PASSED:
            with _rounded(torch.bfloat16):
                errors = exercise.errors(exercise.step(model, model.rounded(torch.bfloat16)), exact, model.values)
        return Reference(model, exact, own, errors, autocast)

    def bounds(self, column: str) -> tuple[float, float]:
        """Return how far off outputs, and gradients, may be."""
        return bounds(column, self.float32, self.bf16)


def _autocast(model: Exercised, exact: Numbers) -> Cell:
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found = exercise.step(model)
    except Exception as error:
        return Cell(REFUSED, detail=in_a_line(error))
    outputs, gradients = exercise.errors(found, exact, model.values)
    finite = max(outputs, gradients) < float("inf")
    return Cell(PASSED if finite else FAILED, outputs, gradients, "" if finite else "inf or NaN")


@contextlib.contextmanager
def _rounded(dtype: torch.dtype) -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: exercise.rounded(t, dtype), lambda t: t):
        yield


def measure(row: Row, op: Any, samples: int, columns: Sequence[str]) -> None:
    """Fill the operator's row from its first samples that plain torch differentiates to finite numbers."""
    tried: set[tuple[torch.Size, ...]] = set()
    for model in exercise.samples_of(op):
        shapes = tuple(v.shape for v in model.values)
        if shapes in tried:
            continue
        reference = Reference.of(model) or Reference.of(model.smaller())
        if reference is None:
            continue
        tried.add(shapes)
        row.samples += 1
        row.add("eager", Cell(PASSED, *reference.float32))
        row.add("autocast", reference.autocast)
        for column in columns:
            row.add(column, judged(column, reference))
        if row.samples == samples:
            break
    if not row.samples:
        row.left_out = "plain torch has no finite gradient of a dense float32 operand"


def judged(column: str, reference: Reference) -> Cell:
    """Compile a sample for one column, run it, and compare it with float64; under autocast with autocast."""
    if column == MIXED:
        return mixed.judged(reference.model)
    cell = _compared(backend_of(column), reference, column)
    if cell.verdict == FAILED and column not in TORCHS:
        plain = _compared(TORCHS["inductor" if column in BY_INDUCTOR else "aot"], reference, "near")
        if plain.verdict != PASSED:
            return Cell(LEFT_OUT, detail=f"torch's own backend: {plain.detail}")
    return cell


def _compared(backend: Any, reference: Reference, column: str) -> Cell:
    torch._dynamo.reset()
    counters.clear()
    model = reference.model
    try:
        with inductor.patch(fallback_random=True):  # eager's random numbers
            call = torch.compile(model, backend=backend)
            found = [exercise.step(model, call) for _ in range(STEPS)]
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        return Cell(REFUSED if isinstance(inner, fxprec.errors.FxprecError) else FAILED, detail=in_a_line(error))
    steps = [exercise.errors(numbers, reference.exact, model.values) for numbers in found]
    cell = against(steps, reference.bounds(column))
    return replace(cell, note="; ".join(filter(None, (cell.note, _cut()))))


def _cut() -> str:
    """Return where Dynamo has broken the graph: what runs between its pieces is not compiled."""
    reasons = [reason.splitlines()[0] for reason in counters["graph_break"]]
    return f"Dynamo breaks the graph: {reasons[0]}" if reasons else ""


def measured(op: Any, samples: int, columns: Sequence[str], seconds: int) -> Row:
    """`measure` within a time, without warnings. Whatever raises is left out by name; what a limit ends is late."""
    row = Row(exercise.name_of(op))
    try:
        with warnings.catch_warnings(), exercise.within(seconds):
            warnings.simplefilter("ignore")
            measure(row, op, samples, columns)
    except exercise.LateError as error:
        row.late = str(error)
    except Exception as error:
        return Row(row.operator, left_out=in_a_line(error))
    return row


def chosen(all_: list[Any], only: list[str], sample: int | None) -> list[Any]:
    """Return those of these names, or ``sample`` of all, drawn by a fixed seed. Raises `LookupError`."""
    if only:
        found = [op for op in all_ if {op.name, exercise.name_of(op)} & set(only)]
        if missing := set(only) - {n for op in found for n in (op.name, exercise.name_of(op))}:
            raise LookupError(f"the suite has no {', '.join(sorted(missing))} with float32 gradients on CPU")
        return found
    if sample is None:
        return all_
    order = torch.randperm(len(all_), generator=torch.Generator().manual_seed(exercise.SEED)).tolist()
    return [all_[i] for i in sorted(order[:sample])]


def rows(operators: list[Any], samples: int, columns: Sequence[str], seconds: int) -> Iterator[Row]:
    """Yield a row an operator."""
    for op in operators:
        yield measured(op, samples, columns, seconds)


def text_of(row: Row, columns: Sequence[str] = COLUMNS) -> str:
    """Return a row as one line of errors: gradients, by column; what failed has its reason behind."""
    if row.left_out:
        return f"{row.operator[:44]:44} left out: {row.left_out}"
    if row.late and not row.cells:
        return f"{row.operator[:44]:44} late: {row.late}"
    cells = [row.cells.get(name) for name in columns]
    numbers = " ".join(f"{'-' if c is None else _short(c):>8}" for c in cells)
    said = "; ".join(
        f"{name}: {c.detail}" for name, c in row.cells.items() if c.verdict in (FAILED, REFUSED) and name != "autocast"
    )
    return f"{row.operator[:44]:44} {numbers}  {said}"[:240]


def _short(cell: Cell) -> str:
    return f"{cell.gradients:.1e}" if cell.verdict == PASSED else cell.verdict
