"""What one compilation of a captured graph made: a value, swapped whole when another takes its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxprec.config import Settings
from fxprec.config.grad_scaling import GradScaling
from fxprec.driver.capture import Captured
from fxprec.numerics.formats import parse
from fxprec.passes.lowering.rows import WatchedRows
from fxprec.passes.pass_report import PassReport
from fxprec.plan import Plan, Site
from fxprec.plan.scales import ScaleGraph

if TYPE_CHECKING:
    from fxprec.passes.analysis.peak.other_sizes import OtherSizes


@dataclass(frozen=True)
class CompileReport:
    """What compiling one graph took. ``seconds``: every compilation, the first included, then each re-lowering."""

    graph: int
    seconds: tuple[float, ...]
    passes: tuple[PassReport, ...]  # of the latest compilation; none where it was found in the cache

    @property
    def passes_seconds(self) -> float:
        """Seconds the passes took in the latest compilation."""
        return sum(p.seconds for p in self.passes)


@dataclass(frozen=True)
class Planned:
    """What the passes decided of a graph."""

    plan: Plan
    scales: ScaleGraph | None
    rows: WatchedRows
    num_results: int
    """Of the forward half, before what it saves for backward."""
    contiguous: tuple[int, ...] = ()
    """Positions among the results of the backward half: gradients of contiguous parameters."""


@dataclass(frozen=True)
class CompiledGraph:
    """Code, and what it was compiled for."""

    run: Callable[..., Any]
    """Takes the graph's inputs and the scale table."""
    captured: Captured
    """With a table of as many rows as ``run`` reads."""
    plan: Plan | None
    """What it serves; None for a calibration step, and where nothing is planned."""
    scales: ScaleGraph | None
    is_training: bool
    copied: tuple[int, ...]
    """Inputs that backward reads a stored copy of."""
    is_calibration: bool = False
    passes: tuple[PassReport, ...] = ()
    seconds: float = 0.0
    peak_sizes: OtherSizes | None = None
    """What other sizes hold, under a peak budget and dynamic shapes."""

    @classmethod
    def of(
        cls,
        run: Callable[..., Any],
        captured: Captured,
        planned: Planned | None,
        *,
        is_training: bool,
        copied: tuple[int, ...],
    ) -> CompiledGraph:
        plan, scales = (None, None) if planned is None else (planned.plan, planned.scales)
        return cls(run, captured, plan, scales, is_training, copied)


class TableFull(Exception):
    """The plan wants more rows than the table has."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows


def rows_of(plan: Plan, scales: ScaleGraph | None, settings: Settings) -> WatchedRows:
    """Return what the code of a plan does with its rows."""
    watches_all = settings.asked.on_nonfinite in ("report", "raise")
    watched = frozenset(s.id for s in plan.sites if _can_lose(s, settings) or (watches_all and not s.saved_as))
    inlines = not settings.is_simulated and not watches_all  # codes do not tell an inf from the largest number
    if scales is None:
        return WatchedRows(watched=watched, inlines=inlines)
    casts, scaling = frozenset(scales.casts), settings.grad_scaling
    measured = counted = frozenset[int]()
    if isinstance(scaling, GradScaling):
        measured = casts | scales.operands
        counted = casts if scaling.estimate == "histogram" else counted
    return WatchedRows(
        watched=casts | measured | watched,
        scaled=scales.rows,
        measured=measured,
        counted=counted,
        inlines=inlines,
    )


def _can_lose(site: Site, settings: Settings) -> bool:
    """Say whether a site can overflow where hi does not, or turn a NaN into a number."""
    if site.saved_as:
        return False  # its blocks have scales of their own; inf and NaN stay to be seen, in all of their block
    fmt = parse(site.format)
    if settings.storage == "packed" and fmt.nan_code is None:
        return True
    if site.direction == "backward" and not fmt.has_float32_range:
        return True
    return site.kind != "grad_param" and site.format != settings.recipe.hi.name
