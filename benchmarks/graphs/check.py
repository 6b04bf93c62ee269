"""One program compiled and compared with float64: outputs, gradients of inputs, parameters and intermediate values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._dynamo.guards as guards
from torch import Tensor

import fxprec
from benchmarks.graphs.program import Program, module_of
from benchmarks.graphs.values import Noise, distance, run
from fxprec.numerics.stats import UNMEASURED

NEAR = fxprec.Recipe(hi="1-8-22", lo_forward="1-8-18", lo_backward="1-8-18", name="nearly exact")
HARDWARE = fxprec.Recipe(hi="fp32", lo_forward="bf16", lo_backward="bf16", name="in bf16")  # for storage="native"
OTHERS = ("aot_eager", "aot_eager_decomp_partition", "inductor")
OWN = ("dynamic", "promotes", "batches")  # options of a program that are not fxprec's
SAMPLES, TIMES = 3, 30.0
"""A difference is explained where it is below ``TIMES`` the largest of ``SAMPLES`` runs with noise."""

OVERFLOWING = (1.0, 0.0, 1.0, 1.0, *UNMEASURED, 0.0, 0.0)
"""A row of counts of one element, which overflowed."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with a compiled program."""

    kind: str
    """``"error"``: it raises where PyTorch does not; ``"values"``: its numbers are others."""
    detail: str
    by_torch: bool = False
    """Whether a backend of torch that computes the same operators has a finding too."""

    def is_like(self, other: Finding | None) -> bool:
        """Return whether both may have one cause: the same exception, or other numbers."""
        if other is None or self.kind != other.kind or self.by_torch != other.by_torch:
            return False
        return self.kind == "values" or self.detail.split(":")[0] == other.detail.split(":")[0]


def check(program: Program) -> Finding | None:
    """Compile and compare every batch; None where all is well, or where noise explains the difference."""
    finding = _compared(program, _fxprec(program))
    if finding is not None and any(_compared(program, lambda _, n=name: n) is not None for name in OTHERS):
        return Finding(finding.kind, finding.detail, by_torch=True)
    return finding


def _fxprec(program: Program) -> Callable[[Any], fxprec.Backend]:
    options = {name: value for name, value in program.options.items() if name not in OWN}
    recipe = HARDWARE if options.get("storage") == "native" else NEAR
    backend = fxprec.Backend(fxprec.Config(recipe=recipe, lowering="eager", **options))
    return lambda _: backend


def _compared(program: Program, backend_for: Callable[[Any], Any]) -> Finding | None:
    try:
        with quick(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _compiled_runs(program, backend_for(None))
    except fxprec.BudgetError:  # no plan meets it, and it says so
        return None
    except Exception as error:
        return Finding("error", in_a_line(error))
    for batch, values in enumerate(found):
        if (detail := _difference(program, batch, values)) is not None:
            return Finding("values", f"batch {batch}: {detail}")
    return None


def _compiled_runs(program: Program, backend: Any) -> list[dict[str, Tensor]]:
    torch._dynamo.reset()
    module = module_of(program, torch.float32)
    compiled = torch.compile(module, backend=backend, dynamic=program.options.get("dynamic", False))
    found = []
    for batch in range(program.options.get("batches", 1)):
        if batch and program.options.get("promotes") and isinstance(backend, fxprec.Backend):
            promote_all(backend)
        found.append(run(program, module, compiled, torch.float32, batch))
    return found


def promote_all(backend: fxprec.Backend) -> int:
    """Let statistics arrive that promote every forward tensor held low; return how many."""
    count = 0
    for controller in backend.controllers:
        sites = [s for s in controller.plan.sites if s.direction == "forward" and s.format != controller.rules.hi]
        if sites:
            row = torch.tensor(OVERFLOWING, dtype=torch.float64)
            controller.queue.push([s.id for s in sites], row.repeat(len(sites)))
            count += len(sites)
    return count


def _unit(program: Program) -> float:
    return 2.0**-8 if program.is_narrow or program.options.get("storage") == "native" else 2.0**-18


def _difference(program: Program, batch: int, found: dict[str, Tensor]) -> str | None:
    wanted = reference(program, batch)
    for name, x in {**wanted, **found}.items():  # a gradient that is none is one of zeros
        for values in (wanted, found):
            values.setdefault(name, torch.zeros_like(x))
    unit = _unit(program)
    scale = max((float(x.norm()) for name, x in wanted.items() if "gradient" in name), default=0.0)
    suspects = {}
    for name, x in wanted.items():
        size = max(float(x.norm()), scale if "gradient" in name else 0.0)
        error = distance(found[name], x)
        if error > TIMES * unit * size + 1e-6:
            suspects[name] = error
    if not suspects:
        return None
    with_noise = [reference(program, batch, Noise(unit, seed)) for seed in range(SAMPLES)]
    for name, error in suspects.items():
        explained = max(distance(noisy.get(name, torch.zeros_like(wanted[name])), wanted[name]) for noisy in with_noise)
        if error > TIMES * explained + 1e-6:
            return f"{name} is off by {error:.3g} of {float(wanted[name].norm()):.3g}; noise explains {explained:.2g}"
    return None


def reference(program: Program, batch: int, noise: Noise | None = None) -> dict[str, Tensor]:
    """Return what the uncompiled program gives in float64 after the batches before."""
    module = module_of(program, torch.float64)
    with noise if noise is not None else torch.enable_grad():
        for earlier in range(batch):
            run(program, module, module, torch.float64, earlier)
        return run(program, module, module, torch.float64, batch)


def in_a_line(error: BaseException, most: int = 300) -> str:
    """Return what was raised in one line of at most so many characters, without Dynamo's wrapping."""
    error = getattr(error, "inner_exception", error)
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:most] if lines else ''}"


@contextmanager
def quick() -> Iterator[None]:
    """Without Dynamo's timing of its guards: it flushes the caches, a fifth of a case."""
    with mock.patch.object(guards, "profile_guard_manager", return_value=0.0):
        yield
