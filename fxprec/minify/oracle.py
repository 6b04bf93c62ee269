"""Decides what counts as a failure: an error against float64, or an exception."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fxprec.config import Config
from fxprec.config.checks import options_of
from fxprec.errors import ConfigError, first_line
from fxprec.testing.case import STEPS, Case, Compiled, Tensors
from fxprec.testing.measure import Measured, measure

# A tensor with a larger error in float32 is rounding noise, such as the gradient of a bias before a batch norm.
TOLD_BY_FLOAT32 = 1e-3


def largest_error(
    factory: Callable[[], object], inputs: object = None, options: Mapping[str, object] | None = None
) -> tuple[str, float]:
    """Return the tensor of one training step that is furthest from float64, and its relative L2 error.

    ``factory`` and ``inputs`` as in `fxprec.testing.verify`, ``options`` as in `fxprec.Config`.
    """
    config = Config.from_options({"lowering": "eager", **options_of(options)})
    worst = furthest(Case.make(factory, inputs), config)
    return worst.name, worst.error


def furthest(case: Case, config: Config) -> Measured:
    """Return the measured tensor with the largest error."""
    exact = Exact.of(case)
    return exact.furthest(Compiled(case, config).run(STEPS))


@dataclass(frozen=True)
class Exact:
    """The float64 tensors of a case, and the float32 ones."""

    tensors: Tensors
    in_float32: Tensors

    @classmethod
    def of(cls, case: Case) -> Exact:
        """Run a case in float64 and in float32."""
        return cls(case.reference(), case.yardstick("fp32"))

    def errors(self, found: Tensors) -> dict[str, Measured]:
        """Measure every tensor whose error in float32 is small enough. Raises `ConfigError` if there is none."""
        rows = measure(found, self.tensors, self.in_float32)
        near = {m.name: m for m in rows if m.reference_error <= TOLD_BY_FLOAT32}
        if not near:
            raise ConfigError(
                "float32 itself differs much from float64 in every tensor of this model, so no error can be measured"
            )
        return near

    def furthest(self, found: Tensors) -> Measured:
        """Return the tensor furthest from float64. Raises `ConfigError` as `errors`."""
        return max(self.errors(found).values(), key=lambda m: m.error)


class Failure(Protocol):
    """The failure that a reduction preserves."""

    def fails(self, case: Case) -> bool:
        """Return whether ``case`` still shows the failure."""

    def describe(self, case: Case) -> str:
        """Return a phrase for what ``case`` shows, whether it fails or not."""


@dataclass(frozen=True)
class ErrorAbove:
    """Fails if any tensor of a step is further than ``limit`` from float64."""

    config: Config
    limit: float

    def fails(self, case: Case) -> bool:
        """Return whether an error is above the limit. A piece that does not run counts as another failure."""
        try:
            return furthest(case, self.config).error > self.limit
        except Exception:  # a piece of a graph may not run; that is another failure
            return False

    def describe(self, case: Case) -> str:
        """Return in one line which tensor is furthest from float64, and how far."""
        worst = furthest(case, self.config)
        where = "above" if worst.error > self.limit else "not above"
        return f"relative error of {worst.name} is {worst.error:.3g}, {where} {self.limit:g}"


@dataclass
class Crashes:
    """Fails if compiling or running raises an exception of the class that the first case raised."""

    config: Config
    _kind: str = field(default="", init=False)

    def fails(self, case: Case) -> bool:
        """Return whether the case raises an exception of the same class as the first one."""
        error = crash_of(case, self.config)
        if error is None:
            return False
        kind = type(innermost(error)).__name__
        self._kind = self._kind or kind
        return kind == self._kind

    def describe(self, case: Case) -> str:
        """Return in one line what is raised."""
        error = crash_of(case, self.config)
        return "raises nothing" if error is None else f"raises {first_line(innermost(error))}"


def crash_of(case: Case, config: Config) -> Exception | None:
    """Compile and run ``case``; return the exception, or None. A case that fails without fxprec returns None."""
    try:
        outputs = case.fresh()(*case.inputs)
    except Exception:
        return None
    del outputs
    try:
        Compiled(case, config).run(STEPS)
    except Exception as error:
        return error
    return None


def innermost(error: BaseException) -> BaseException:
    """Return the exception that Dynamo wrapped."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    return error if inner is None or isinstance(error, ConfigError) else innermost(inner)
