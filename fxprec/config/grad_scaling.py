"""The scaling of gradients into the range of their format: option ``grad_scaling``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fxprec.config import checks
from fxprec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GradScaling(checks.Options):
    """One scale for each gradient (Zhao et al. 2020; docs/algorithms.md, "Gradient scaling").

    Raises `ConfigError` for a value out of range.
    """

    underflow: float = 1e-3
    """Share of a gradient's non-zero elements that may round to zero, between 0 and 1 (the paper's gamma)."""
    interval: int = 100
    """Steps between two refreshes of the scales, at least 1."""
    estimate: Literal["statistical", "histogram"] = "statistical"
    """``"statistical"`` assumes the paper's distributions; ``"histogram"`` counts exponents without an assumption."""

    def __post_init__(self) -> None:
        underflow = checks.number("grad_scaling.underflow", self.underflow, "a number between 0 and 1, both excluded")
        if not 0 < underflow < 1:
            raise ConfigError(f"grad_scaling.underflow is {underflow!r}; it must lie between 0 and 1, both excluded")
        object.__setattr__(self, "underflow", underflow)
        object.__setattr__(self, "interval", checks.integer("grad_scaling.interval", self.interval, least=1))
        checks.one_of("grad_scaling.estimate", self.estimate, ("statistical", "histogram"))


@dataclass(frozen=True, kw_only=True)
class LossScaling(checks.Options):
    """One scale for all gradients, as a baseline (Micikevicius et al. 2018).

    A dynamic scale grows after ``growth_interval`` steps without overflow. On overflow the scale is reduced and the
    optimizer step is skipped; to know this, every step waits for the device. Raises `ConfigError` for a value out of
    range.
    """

    initial: float = 65536.0
    """The scale at the start, a power of two from 2**-60 to 2**60."""
    dynamic: bool = True
    """Whether the scale changes; otherwise the scale stays ``initial`` and the next three options are unused."""
    growth: float = 2.0
    """Factor of growth, a power of two above 1."""
    backoff: float = 0.5
    """Factor on overflow, a power of two below 1."""
    growth_interval: int = 2000
    """Steps without overflow before the scale grows, at least 1; the papers use the steps of one epoch."""

    def __post_init__(self) -> None:
        for name, low, high in (("initial", -60, 60), ("growth", 1, 60), ("backoff", -60, -1)):
            allowed = f"a power of two from 2**{low} to 2**{high}"
            value = checks.number(f"grad_scaling.{name}", getattr(self, name), allowed)
            if value <= 0 or math.frexp(value)[0] != 0.5 or not low <= exponent_of(value) <= high:
                raise ConfigError(f"grad_scaling.{name} is {value!r}; it must be {allowed}")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "dynamic", checks.boolean("grad_scaling.dynamic", self.dynamic))
        interval = checks.integer("grad_scaling.growth_interval", self.growth_interval, least=1)
        object.__setattr__(self, "growth_interval", interval)


def exponent_of(power: float) -> int:
    """Return k of a power of two 2**k."""
    return math.frexp(power)[1] - 1


Scaling: TypeAlias = GradScaling | LossScaling
NAMED: dict[str, Scaling | None] = {
    "auto": GradScaling(),
    "none": None,
    "fixed": LossScaling(dynamic=False),
    "dynamic": LossScaling(),
}
