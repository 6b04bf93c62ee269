"""The result of compiling a captured graph: one immutable value, which the cache stores and a graph swaps whole."""

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
from fxprec.runtime.nonfinite import NonfiniteWatch
from fxprec.runtime.scaling import keeper
from fxprec.runtime.scaling.copies import CopyScales
from fxprec.runtime.scaling.keeper import Keeper
from fxprec.runtime.stats import StatsQueue

if TYPE_CHECKING:
    from fxprec.driver.capture import SizeGuards
    from fxprec.passes.analysis.replay.other_sizes import OtherSizes


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The code of a graph, with its plan and scales. The cache stores the value without the last three fields."""

    capacity: int
    """Rows of the scale table that the code reads."""
    is_training: bool = False
    plan: Plan | None = None
    """The plan of the code; None for a calibration step, and for a graph that is not planned."""
    scales: ScaleGraph | None = None
    rows: WatchedRows = field(default_factory=WatchedRows)
    num_results: int = 0
    """Number of the forward half's own outputs; the tensors saved for backward come after them."""
    contiguous: tuple[int, ...] = ()
    """Positions among the results of the backward half: gradients of contiguous parameters."""
    copied: tuple[int, ...] = ()
    """Positions of the inputs of which backward reads a stored copy."""
    is_calibration: bool = False
    assumes: SizeGuards | None = None
    """Conditions on sizes that Dynamo does not check."""
    peak_sizes: OtherSizes | None = None
    """The peaks of other input sizes, under a peak budget and dynamic shapes."""
    passes: tuple[PassReport, ...] = ()
    """One report per pass; empty if the code comes from the cache."""
    run: Run | None = None
    """Takes the graph's inputs and the scale table; None until both halves are compiled."""


@dataclass(frozen=True)
class Retry:
    """The result of an attempt that must be repeated, with other budget bounds or with a larger scale table."""

    capacity: int


class Stop(Exception):
    """Exception that leaves torch's ``compile_fx`` from one of its callbacks, which cannot return a `Retry`."""

    def __init__(self, retry: Retry) -> None:
        super().__init__(retry)
        self.retry = retry


@dataclass(frozen=True)
class CompileReport:
    """Compile time and pass reports of one graph.

    ``seconds``: one number per compilation, the first one first; each includes all plans that the compilation tried.
    """

    graph: int
    seconds: tuple[float, ...]
    passes: tuple[PassReport, ...]  # of the latest compilation; empty if its code comes from the cache

    @property
    def passes_seconds(self) -> float:
        """Seconds the passes took in the latest compilation."""
        return sum(p.seconds for p in self.passes)


def controller_of(compiled: Compiled, settings: Settings, device: torch.device, queue: StatsQueue) -> Controller:
    """Return the controller of compiled code: it keeps plan and statistics during training."""
    assert compiled.plan is not None
    action, has_true_infs = settings.asked.on_nonfinite, not isinstance(settings.grad_scaling, LossScaling)
    return Controller(
        compiled.plan,
        Rules(promote_above=settings.asked.promote_above, hi=settings.recipe.hi.name),
        compiled.capacity,
        device,
        keeper=keeper_of(compiled, settings),
        copies=copies_of(compiled, settings),
        queue=queue,
        nonfinite=None if action == "ignore" else NonfiniteWatch(gradients=has_true_infs, action=action),
    )


def keeper_of(compiled: Compiled, settings: Settings) -> Keeper | None:
    """Return the keeper of compiled code's gradient scales during training; None if no gradient has a scale."""
    scaling = settings.grad_scaling
    if compiled.scales is None or not compiled.scales.variables or scaling is None:
        return None
    return keeper.keeper_of(scaling, compiled.scales, settings.asked.promote_above)


def copies_of(compiled: Compiled, settings: Settings) -> CopyScales | None:
    """Return the keeper of the scales of stored copies; None if no copy has a scale."""
    if compiled.scales is None or not compiled.scales.copies:
        return None
    return CopyScales(compiled.scales, settings.asked.promote_above)
