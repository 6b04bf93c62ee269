"""Rows of the scale table as compiled code uses them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from fxprec.config import Settings
from fxprec.config.grad_scaling import GradScaling
from fxprec.numerics.formats import parse
from fxprec.plan import Plan, Site
from fxprec.plan.scales import ScaleGraph


@dataclass(frozen=True, kw_only=True)
class WatchedRows:
    """Rows of the table, by their use in lowered code."""

    watched: frozenset[int] = frozenset()
    """Their statistics are appended to the outputs."""
    scaled: frozenset[int] = frozenset()
    """Their scale exponent may differ from 0."""
    copied: frozenset[int] = frozenset()
    """Those of them that are copies of forward tensors."""
    measured: frozenset[int] = frozenset()
    """Their moments count too, in steps that measure."""
    counted: frozenset[int] = frozenset()
    """They get a histogram."""
    inlines: bool = False
    """Casts of no gradient may be part of the loops around them; what they lose is then counted from their codes."""

    def without(self, rows: Collection[int]) -> WatchedRows:
        """Return the same but for the statistics of ``rows``."""
        return replace(self, watched=self.watched - frozenset(rows))


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
        copied=scales.copied,
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
