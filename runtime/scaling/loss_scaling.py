"""Keep one scale for all gradients, fixed or dynamic: the baseline of gradient scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxprec.config.grad_scaling import LossScaling, exponent_of
from fxprec.plan.scales import ScaleGraph
from fxprec.runtime.scaling.record import UNSCALED
from fxprec.runtime.stats import SiteStats

MAX_LOSS_EXP = 60


@dataclass
class LossScaleKeeper:
    """A keeper with the same exponent for every variable: a loss scale, as the graph sees it."""

    scaling: LossScaling
    graph: ScaleGraph
    exps: list[int] = field(default_factory=list)
    measures: bool = False
    waits: bool = False
    is_new: bool = False
    overflowed: bool = False  # since the last update
    spoilt: bool = (
        False  # since the optimizer's last step, which may follow several backward passes: it must be skipped
    )
    stepped: bool = False  # whether the optimizer has stepped since the last update
    _seen: bool = False
    _good_steps: int = 0

    def __post_init__(self) -> None:
        self.exps = [exponent_of(self.scaling.initial)] * len(self.graph.variables)

    def begin(self, amax: float, step: int, tell: Callable[[str, int, str], None]) -> None:
        """Do nothing: a loss scale starts with the given scale."""

    def ask(self) -> None:
        """Do nothing: a loss scale measures nothing."""

    def note(self, stats: SiteStats, step: int) -> None:
        """Take one row's statistics. If a gradient overflows, the optimizer step will be skipped."""
        if stats.site in self.graph.casts:
            self._seen = True
            self.overflowed |= stats.overflow_ratio > 0
            self.spoilt |= self.overflowed

    def update(self, step: int, tell: Callable[[str, int, str], None]) -> None:
        """Back off after an overflow, grow after ``growth_interval`` steps without one."""
        if self.stepped:
            self.spoilt = self.stepped = False
        if not self.scaling.dynamic or not self._seen:
            return
        change = 0
        if self.overflowed:
            change, self._good_steps = exponent_of(self.scaling.backoff), 0
        else:
            self._good_steps += 1
            if self._good_steps == self.scaling.growth_interval:
                change, self._good_steps = exponent_of(self.scaling.growth), 0
        self._seen = self.overflowed = False
        if change and self.exps:
            was = self.exps[0]
            now = max(-MAX_LOSS_EXP, min(MAX_LOSS_EXP, was + change))
            self.exps = [now] * len(self.exps)
            tell("scale", min(self.graph.site_of.values()), f"loss scale 2**{was} -> 2**{now}")

    def describe(self, row: int) -> dict[str, Any]:
        """Return what `Backend.stats` shows of a cast: the one scale, and no estimates."""
        return {**UNSCALED, "scale_exponent": self.exps[self.graph.casts[row]]}

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "exps": list(self.exps),
            "overflowed": self.overflowed,
            "seen": self._seen,
            "good_steps": self._good_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`."""
        self.exps = list(state["exps"])
        self.overflowed, self._seen, self._good_steps = state["overflowed"], state["seen"], state["good_steps"]
