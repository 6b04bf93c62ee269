"""Which rows of the scale table compiled code scales, counts and measures."""

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
    """Rows whose statistics are appended to the outputs."""
    scaled: frozenset[int] = frozenset()
    """Rows whose scale exponent may differ from 0."""
    copied: frozenset[int] = frozenset()
    """Scaled rows that are copies of forward tensors."""
    measured: frozenset[int] = frozenset()
    """Rows whose moments are counted too, in steps that measure."""
    counted: frozenset[int] = frozenset()
    """Rows with a histogram."""
    inlines: bool = False
    """Whether casts, except of gradients, may be part of the loops around them; their codes then give the losses."""

    def without(self, rows: Collection[int]) -> WatchedRows:
        """Return the same rows without the statistics of ``rows``."""
        return replace(self, watched=self.watched - frozenset(rows))


def rows_of(plan: Plan, scales: ScaleGraph | None, settings: Settings) -> WatchedRows:
    """Return what a plan's code does with each row."""
    watched = frozenset(
        s.id for s in plan.sites if _can_lose(s, settings) or (settings.counts_while_rounding and s.has_codes)
    )
    inlines = not settings.is_simulated and not settings.counts_while_rounding
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
    """Return whether a site can overflow where ``hi`` cannot, or turn a NaN into a number."""
    if not site.has_codes:
        return False  # blocks have scales of their own, and inf and NaN show in their whole block
    fmt = parse(site.format)
    if settings.storage == "packed" and fmt.nan_code is None:
        return True
    if site.direction == "backward" and not fmt.has_float32_range:
        return True
    return site.kind != "grad_param" and site.format != settings.recipe.hi.name
