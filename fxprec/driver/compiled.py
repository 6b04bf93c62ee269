"""What compiling a captured graph makes: one value, which the cache keeps and which a graph swaps whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fxprec.config import Settings
from fxprec.config.grad_scaling import LossScaling
from fxprec.driver.wrappers import Run
from fxprec.passes.lowering.rows import WatchedRows
from fxprec.passes.pass_report import PassReport
from fxprec.plan import Plan
from fxprec.plan.scales import ScaleGraph
from fxprec.runtime.controller import Controller, Rules
from fxprec.runtime.nonfinite import Nonfinite, NonfiniteWatch
from fxprec.runtime.scaling import keeper
from fxprec.runtime.scaling.copies import CopyScales
from fxprec.runtime.scaling.keeper import Keeper
from fxprec.runtime.stats import StatsQueue

if TYPE_CHECKING:
    from fxprec.passes.analysis.replay.other_sizes import OtherSizes


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Code, and what it was compiled for. The cache keeps it as it is before the last three fields are known."""

    capacity: int
    """Rows of the scale table that the code reads."""
    is_training: bool = False
    plan: Plan | None = None
    """What it serves; None for a calibration step, and where nothing is planned."""
    scales: ScaleGraph | None = None
    rows: WatchedRows = field(default_factory=WatchedRows)
    num_results: int = 0
    """Number of the forward half's own outputs, which come before what it saves for backward."""
    contiguous: tuple[int, ...] = ()
    """Positions among the results of the backward half: gradients of contiguous parameters."""
    copied: tuple[int, ...] = ()
    """Inputs that backward reads a stored copy of."""
    is_calibration: bool = False
    peak_sizes: OtherSizes | None = None
    """What other sizes hold, under a peak budget and dynamic shapes."""
    passes: tuple[PassReport, ...] = ()
    """Empty where it was found in the cache."""
    run: Run | None = None
    """Takes the graph's inputs and the scale table; None until both halves are there."""


@dataclass(frozen=True)
class Retry:
    """The answer of an attempt to compile that another has to follow: with other bounds, or with a larger table."""

    capacity: int


class Stop(Exception):
    """Leaves torch's ``compile_fx`` from inside of its callbacks, which can give it no other answer."""

    def __init__(self, retry: Retry) -> None:
        super().__init__(retry)
        self.retry = retry


@dataclass(frozen=True)
class CompileReport:
    """What compiling one graph took.

    ``seconds``: every compilation with all plans that it tried, the first included, then each re-lowering.
    """

    graph: int
    seconds: tuple[float, ...]
    passes: tuple[PassReport, ...]  # of the latest compilation; none where it was found in the cache

    @property
    def passes_seconds(self) -> float:
        """Seconds the passes took in the latest compilation."""
        return sum(p.seconds for p in self.passes)


def controller_of(compiled: Compiled, settings: Settings, device: torch.device, queue: StatsQueue) -> Controller:
    """Return what holds the plan and statistics of compiled code while training."""
    assert compiled.plan is not None
    action = settings.asked.on_nonfinite
    watch = NonfiniteWatch(gradients=not isinstance(settings.grad_scaling, LossScaling))
    return Controller(
        compiled.plan,
        Rules(promote_above=settings.asked.promote_above, hi=settings.recipe.hi.name),
        compiled.capacity,
        device,
        keeper=keeper_of(compiled, settings),
        copies=copies_of(compiled, settings),
        queue=queue,
        nonfinite=None if action == "ignore" else Nonfinite(watch, action),
    )


def keeper_of(compiled: Compiled, settings: Settings) -> Keeper | None:
    """Return what holds the scales of compiled code while training; None where nothing has one."""
    scaling = settings.grad_scaling
    if compiled.scales is None or not compiled.scales.variables or scaling is None:
        return None
    return keeper.keeper_of(scaling, compiled.scales, settings.asked.promote_above)


def copies_of(compiled: Compiled, settings: Settings) -> CopyScales | None:
    """Return what holds the scales of stored copies; None where none has one."""
    if compiled.scales is None or not compiled.scales.copies:
        return None
    return CopyScales(compiled.scales, settings.asked.promote_above)
