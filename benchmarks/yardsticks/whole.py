"""Steps of a whole model, forward and backward, compiled and judged against float64.

The model trains (``train()``), its dropout is off, and its loss is a random projection of all outputs. Everything is made
again, seeded, for each run, so that no run sees another's buffers. A run takes `STEPS` steps on the same inputs, from the same
weights and under the same seed; the last one is judged. The first is noted: stored copies get their scales from the
statistics of earlier steps. Columns: plain torch in float32 (eager), `torch.autocast`
in bfloat16, torch's own AOTAutograd with Inductor's decompositions and partitioner (aot), Inductor, and fxprec's recipes. Inductor
compiles fp32, and fp8 as compiled. The reference lowering, without C++, runs plain (fp32), near (formats of 18 and 22 mantissa bits),
bf16 and fp8. Unless they are asked for, Inductor runs where a column fails that it compiles, and aot where another does.

An error is relative, in the Euclidean norm: the largest over outputs, and the largest over gradients, where a gradient that is
small beside the others is measured by `SMALL` of all of them together. The criteria are those of `op_db`: float32's noise for
fp32, and times the formats' precision for near; for bf16 three times autocast's error, or where autocast refuses the model
that of products in bfloat16 alone; for fp8 that of outputs, and of gradients three times e4m3fn's error of one number more.
What fails and fails in torch's own backend too is left out by name. A failure of fp8 has a note beside it: the error of plain torch
that rounds what it saves to e4m3fn.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import resource
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.utils._pytree import tree_leaves, tree_map_only

import fxprec
from benchmarks.graphs.check import in_a_line
from benchmarks.yardsticks.cells import (
    BY_INDUCTOR,
    BY_THE_REFERENCE,
    FAILED,
    IN_8_BITS,
    LEFT_OUT,
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
from benchmarks.yardsticks.exercise import SEED
from benchmarks.yardsticks.products import ProductsInBf16
from benchmarks.yardsticks.rounded_copies import save_in_e4m3fn

SMALL = 0.1  # of all gradients together
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A module, and its positional and named inputs."""


@dataclass(frozen=True)
class Model:
    """A model of a suite: ``make`` is called under a fixed seed, for every run again."""

    name: str
    make: Callable[[], Made]


@dataclass
class Numbers:
    """What one step gives, in float64."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


class NoGradientError(Exception):
    """Nothing that the model returns has a gradient of a parameter or an input."""


def seed_all() -> None:
    random.seed(SEED)
    torch.manual_seed(SEED)


def run(model: Model, steps: int, dtype: torch.dtype = torch.float32, backend: Any = None) -> list[Numbers]:
    """Make the model; return the numbers of each step. Raises `NoGradientError`, and what the model raises."""
    seed_all()
    module, args, kwargs = model.make()
    module = module.train().to(dtype)
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    call = module if backend is None else torch.compile(module, backend=backend, dynamic=False)
    return [_step(model.name, module, call, (args, kwargs), dtype) for _ in range(steps)]


def _step(name: str, module: nn.Module, call: Any, given: tuple[Any, Any], dtype: torch.dtype) -> Numbers:
    args, kwargs = tree_map_only(Tensor, lambda t: _input(t, dtype), given)
    wanted = dict(module.named_parameters())
    wanted |= {f"input {i}": t for i, t in enumerate(tree_leaves((args, kwargs))) if isinstance(t, Tensor)}
    wanted = {name: t for name, t in wanted.items() if t.requires_grad}
    for t in wanted.values():
        t.grad = None
    seed_all()
    outputs = [t for t in tree_leaves(call(*args, **kwargs)) if isinstance(t, Tensor) and t.numel()]
    generator = torch.Generator().manual_seed(SEED + 1)
    incoming = [torch.randn(t.shape, dtype=torch.float64, generator=generator) for t in outputs]
    pairs = [(t, g.to(t.dtype)) for t, g in zip(outputs, incoming, strict=True) if t.requires_grad]
    if not pairs or not wanted:
        raise NoGradientError(name)
    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs], inputs=list(wanted.values()))
    gradients = {name: _exact(t.grad) for name, t in wanted.items() if t.grad is not None}
    if not gradients:
        raise NoGradientError(name)
    return Numbers([_exact(t) for t in outputs], gradients)


def _input(t: Tensor, dtype: torch.dtype) -> Tensor:
    is_float = t.dtype == torch.float32
    found = t.detach().clone().to(dtype if is_float else t.dtype)
    return found.requires_grad_(t.requires_grad)


def _exact(t: Tensor) -> Tensor:
    t = t.detach()
    t = t.to_dense() if t.layout is not torch.strided else t
    return torch.view_as_real(t.resolve_conj()).double() if t.is_complex() else t.double()


def worst(found: list[Numbers], exact: list[Numbers]) -> float:
    return max(max(errors(f, e)) for f, e in zip(found, exact, strict=True))


def errors(found: Numbers, exact: Numbers) -> tuple[float, float]:
    """Return the largest relative error of an output, and of a gradient. A missing gradient is one of zeros."""
    if len(found.outputs) != len(exact.outputs):
        return float("inf"), float("inf")
    outputs = max((_off(f, e, 1e-12) for f, e in zip(found.outputs, exact.outputs, strict=True)), default=0.0)
    all_ = sum(float(g.nan_to_num(0, 0, 0).square().sum()) for g in exact.gradients.values()) ** 0.5
    gradients = 0.0
    for name in {**exact.gradients, **found.gradients}:
        pair = [of.gradients.get(name) for of in (found, exact)]
        f, e = (torch.zeros_like(next(t for t in pair if t is not None)) if g is None else g for g in pair)
        gradients = max(gradients, _off(f, e, SMALL * all_))
    return outputs, gradients


def _off(found: Tensor, exact: Tensor, at_least: float) -> float:
    if found.shape != exact.shape:
        return float("inf")
    same = (found == exact) | (found.isnan() & exact.isnan())
    error = float(torch.where(same, 0.0, found - exact).norm())
    error /= max(float(exact.nan_to_num(0, 0, 0).norm()), at_least, 1e-12)
    return error if error == error else float("inf")


@dataclass(frozen=True)
class Reference:
    """The exact step, and how far off plain torch is in fewer bits."""

    model: Model
    exact: list[Numbers]
    """By step."""
    float32: tuple[float, float]
    autocast: Cell
    bf16: tuple[float, float]
    """By autocast; where it refuses the model, with products in bfloat16 alone."""

    @staticmethod
    def of(model: Model) -> Reference:
        """Raises what the model raises, `NoGradientError`, and `ArithmeticError` where two runs differ.

        A model that keeps a part of its graph takes one step.
        """
        try:
            plain = run(model, STEPS)
        except Exception:
            plain = run(model, 1)
        if worst(run(model, len(plain)), plain) > 1e-3:
            raise ArithmeticError("two runs of plain torch differ")
        exact, own = plain, (0.0, 0.0)
        with contextlib.suppress(Exception):  # a model that has no float64
            wide = run(model, len(plain), torch.float64)
            if worst(plain, wide) <= OWN:
                exact, own = wide, errors(plain[-1], wide[-1])
        if not all(bool(t.isfinite().all()) for step in exact for t in step.gradients.values()):
            raise ArithmeticError("a gradient of plain torch is inf or NaN")
        autocast = _autocast(model, exact)
        if autocast.verdict == PASSED:
            return Reference(model, exact, own, autocast, (autocast.outputs, autocast.gradients))
        return Reference(model, exact, own, autocast, _in_products(model, exact))

    def bounds(self, column: str) -> tuple[float, float]:
        """Return how far off outputs, and gradients, may be."""
        return bounds(column, self.float32, self.bf16)


def _autocast(model: Model, exact: list[Numbers]) -> Cell:
    try:
        with torch.autocast("cpu", torch.bfloat16):
            outputs, gradients = errors(run(model, len(exact))[-1], exact[-1])
    except Exception as error:
        return Cell(REFUSED, detail=in_a_line(error))
    is_finite = max(outputs, gradients) < float("inf")
    return Cell(PASSED if is_finite else FAILED, outputs, gradients, "" if is_finite else "inf or NaN")


def _in_products(model: Model, exact: list[Numbers]) -> tuple[float, float]:
    """Return how far off the model is with products in bfloat16; zeros where that fails, or is inf or NaN."""
    with contextlib.suppress(Exception), ProductsInBf16():
        found = errors(run(model, len(exact))[-1], exact[-1])
        if max(found) < float("inf"):
            return found
    return 0.0, 0.0


def measure(model: Model, columns: Iterable[str]) -> Row:
    """Return the model's row."""
    row = Row(model.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reference = Reference.of(model)
        except Exception as error:
            row.left_out = in_a_line(error)
            return row
        row.add("eager", Cell(PASSED, *reference.float32))
        row.add("autocast", reference.autocast)
        row.samples = 1
        for column in columns:
            row.add(column, _judged(column, reference, row))
    return row


def _judged(column: str, reference: Reference, row: Row) -> Cell:
    if column in TORCHS:
        return _compared(backend_of(column), reference, column)[0]
    cell, graphs = _compared(backend_of(column), reference, column)
    own = "inductor" if column in BY_INDUCTOR else "aot"
    if cell.verdict == FAILED and own not in row.cells:
        row.add(own, _compared(TORCHS[own], reference, own)[0])
    if cell.verdict == FAILED and row.cells[own].verdict != PASSED:
        return Cell(LEFT_OUT, detail=f"torch's own {own}: {row.cells[own].detail}")
    if not graphs and cell.verdict == PASSED:
        return Cell(LEFT_OUT, detail="Dynamo compiles nothing of it")
    if cell.verdict == FAILED and column in IN_8_BITS:
        cell.note = f"plain torch that saves in e4m3fn: a gradient is off by {_in_e4m3fn(reference):.3g}"
    return cell


def _in_e4m3fn(reference: Reference) -> float:
    """Return how far off a gradient is of plain torch in float32, with what it saves rounded to e4m3fn."""

    def make() -> Made:
        made = reference.model.make()
        save_in_e4m3fn(made[0])
        return made

    with contextlib.suppress(Exception):
        return errors(run(Model(reference.model.name, make), 1)[0], reference.exact[0])[1]
    return float("nan")


def _compared(backend: Any, reference: Reference, column: str) -> tuple[Cell, int]:
    """Return the cell, and how many graphs Dynamo found."""
    torch._dynamo.reset()
    counters.clear()
    try:
        with inductor.patch(fallback_random=True, compile_threads=1):  # eager's random numbers; a fork has no pool
            found = run(reference.model, len(reference.exact), backend=backend)
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        verdict = REFUSED if isinstance(inner, fxprec.errors.FxprecError) else FAILED
        cell = Cell(verdict, detail=in_a_line(error))
    else:
        cell = against([errors(f, e) for f, e in zip(found, reference.exact, strict=True)], reference.bounds(column))
    return cell, counters["stats"]["unique_graphs"]


def warm(columns: Iterable[str]) -> None:
    """Import, before processes are forked, what is imported when something compiles."""
    for make in (_linear, _convolution):
        measure(Model("warm", make), columns)


def _linear() -> Made:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), (torch.ones(2, 4),), {}


def _convolution() -> Made:
    return nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU()), (torch.ones(2, 2, 8, 8),), {}


@dataclass
class Suite:
    """Models in the order they are tried; ``wanted`` of them are counted, those that plain torch differentiates."""

    models: list[Model]
    wanted: int
    columns: tuple[str, ...] = BY_THE_REFERENCE
    seconds: int = 60
    tried: list[Row] = field(default_factory=list)

    def rows(self) -> Iterator[Row]:
        """Yield a row a model, each made in a process of its own: a model may hang, or end its process."""
        warm(self.columns)
        counted = 0
        for model in self.models if self.wanted > 0 else ():
            row = apart(model.name, partial(measure, model, self.columns), self.seconds)
            self.tried.append(row)
            counted += bool(row.samples)
            yield row
            if counted == self.wanted:
                return


def apart(name: str, measured: Callable[[], Row], seconds: float) -> Row:
    """Return a row that a process of its own measures.

    The process ends after so many seconds of processor time. One that waits for what does not come is ended after four times as
    many.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, measured, seconds), daemon=True)
    process.start()
    there.close()
    if not here.poll(4 * seconds):
        process.kill()
    try:
        row: Row = here.recv()
    except EOFError:
        process.join()
        late = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        row = (
            Row(name, late=f"longer than {seconds} s")
            if late
            else Row(name, left_out=f"its process ended with {process.exitcode}")
        )
    process.join()
    here.close()
    return row


def _send(there: Connection, measured: Callable[[], Row], seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (ceil(seconds), ceil(seconds)))
    there.send(measured())
    there.close()
