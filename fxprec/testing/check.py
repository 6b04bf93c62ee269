"""Check one step of fxprec against float64 and a reference precision, by two rules and a golden file."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fxprec.config import Config
from fxprec.config.checks import one_of, options_of
from fxprec.driver.backend import Backend
from fxprec.errors import ConfigError, NumericsError
from fxprec.numerics.formats import BF16, parse
from fxprec.plan import Plan
from fxprec.testing import golden as goldens
from fxprec.testing.case import DTYPES, STEPS, Case, Compiled, Loss
from fxprec.testing.finding import Finding, Place, Row, table
from fxprec.testing.measure import Measured, measure

ROUNDING = {"bf16": 2.0**-9, "fp16": 2.0**-12, "fp32": 2.0**-25}  # relative, half a unit in the last place
TIMES = 3.0  # PyTorch's own same() allows 2 to 3


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The bounds of every tensor. Each rule compares a tensor with the float64 run."""

    k: float | None = None
    """Error at most ``k`` times the reference precision's (PyTorch's ``same()``). None: 3, doubled for each mantissa
    bit that the plan's coarsest format has less than bfloat16."""
    floor: float | None = None
    """Relative error that replaces the reference's if the reference's happens to be smaller. None: one rounding."""
    sqnr: float | None = 20.0
    """Least signal-to-noise ratio in dB, for tensors whose ratio in the reference precision is above it; or None."""
    reference: str = "bf16"
    """Precision to compare with, uncompiled: "bf16", "fp16" or "fp32"."""

    def __post_init__(self) -> None:
        one_of("reference", self.reference, tuple(DTYPES))
        for name in ("k", "floor", "sqnr"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value >= 0):
                raise ConfigError(f"{name} is {value!r}; give it a number of at least 0, or None")

    def k_for(self, plans: Iterable[Plan]) -> float:
        """Return ``k``, or its default for the formats of these plans."""
        if self.k is not None:
            return self.k
        fewest = min((parse(s.format).mantissa_bits for p in plans for s in p.sites), default=BF16.mantissa_bits)
        return TIMES * 2.0 ** max(BF16.mantissa_bits - fewest, 0)

    @property
    def floor_(self) -> float:
        """Return the given floor, or the floor of the reference precision."""
        return ROUNDING[self.reference] if self.floor is None else self.floor


@dataclass(frozen=True)
class Outcome:
    """The tensors that a check measured, and its findings."""

    rows: list[Row]
    golden: goldens.Golden
    findings: list[Finding] = field(default_factory=list)
    wrote: Path | None = None
    """The golden file, if this check wrote it."""

    def message(self) -> str:
        """Return the findings as a table, worst first."""
        return table(self.findings, self.rows) if self.findings else "nothing differs"

    def raise_if_wrong(self) -> None:
        """Raise `NumericsError` with the table."""
        if self.findings:
            raise NumericsError(self.message())


def verify(
    factory: Callable[[], object],
    inputs: object = None,
    *,
    options: Mapping[str, object] | None = None,
    loss: Loss | None = None,
    thresholds: Thresholds | None = None,
    seed: int = 0,
    golden: Path | None = None,
    update: bool = False,
) -> Outcome:
    """Measure one training step of ``factory()`` and compare it; see `Thresholds` for the rules.

    ``options`` are `fxprec.Config`'s, with ``lowering="eager"`` by default. ``loss`` maps the outputs, in float32 or
    wider, to a scalar; by default it is half the mean squared distance of the outputs to fixed targets. With
    ``golden``, plan and statistics are compared with that file. If the file is missing or ``update`` is set, it is
    written, provided that the rules hold.

    Raises `ConfigError`, `ReferenceRunError` and `GoldenError` if it cannot compare; wrong numbers raise nothing.
    """
    thresholds = thresholds or Thresholds()
    config = Config.from_options({"lowering": "eager", **options_of(options)})
    stored = goldens.load(golden) if golden is not None and golden.exists() and not update else None
    case = Case.make(factory, inputs, loss=loss, seed=seed)
    exact, yardstick = case.reference(), case.yardstick(thresholds.reference)
    compiled = Compiled(case, config)

    def measured(steps: int) -> list[Measured]:
        return measure(compiled.run(steps), exact, yardstick)

    tensors = measured(STEPS)
    backend = compiled.backend
    now = goldens.take(config, backend, tensors, case.inputs_hash)
    k = thresholds.k_for(backend.plans)
    rows = [_row(m, case, backend, k, thresholds) for m in tensors]
    findings = [f for row in rows for f in _broken(row, k, thresholds)]
    wrote = None
    if stored is not None:
        findings += goldens.differences(stored, now, {row.measured.name: row.place for row in rows})
    elif golden is not None and not findings:
        goldens.save(goldens.with_tolerances(now, compiled, measured), golden)
        wrote = golden
    return Outcome(rows, now, findings, wrote)


def _row(m: Measured, case: Case, backend: Backend, k: float, thresholds: Thresholds) -> Row:
    allowed = k * max(m.reference_error, thresholds.floor_)
    return Row(m, _place(m.name, case, backend), allowed, m.error / allowed if allowed else math.inf)


def _broken(row: Row, k: float, thresholds: Thresholds) -> Iterable[Finding]:
    m, reference = row.measured, thresholds.reference
    if math.isinf(m.error):
        yield Finding(m.name, row.place, "missing, or not finite", math.inf)
        return
    if m.error > row.allowed:
        times = m.error / max(m.reference_error, thresholds.floor_)
        yield Finding(m.name, row.place, f"error is {times:.3g} times {reference}'s; at most {k:g}", row.share)
    least = thresholds.sqnr
    if least is not None and m.sqnr < least and m.reference_sqnr >= least:
        severity = 10 ** ((least - m.sqnr) / 20)
        yield Finding(m.name, row.place, f"SQNR {m.sqnr:.1f} dB; at least {least:g}", severity)


def _place(name: str, case: Case, backend: Backend) -> Place:
    """Return a tensor's module and source line; for a gradient, the line that uses its parameter."""
    param = name.removesuffix(".grad")
    if param != name:
        sites = (s for plan in backend.plans for s in plan.sites if s.tensor == param)
        source = next((s.source for s in sites if s.source), "")
        return Place(param.rpartition(".")[0], source)
    return Place(case.name, _forward_line(case))


def _forward_line(case: Case) -> str:
    cls = type(case.model)
    if cls.__module__.startswith("torch."):
        return ""
    try:
        return f"{Path(inspect.getfile(cls.forward)).name}:{inspect.getsourcelines(cls.forward)[1]}"
    except (OSError, TypeError):
        return ""
