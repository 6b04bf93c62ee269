"""The controller of one compiled graph: reads statistics late, promotes, rescales, records events.

It knows sites and numbers, no FX. It never blocks: what has not arrived is read before a later step.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fxprec.errors import PlanError
from fxprec.formats import parse
from fxprec.plan import Plan, Site
from fxprec.plan_json import from_dict
from fxprec.runtime.events import Event
from fxprec.runtime.scaling import HEADROOM_EXP, scale_exp
from fxprec.runtime.stats import SiteStats, StatsQueue
from fxprec.runtime.table import build_table

MAX_EVENTS = 10_000  # scales change as long as training runs; the oldest are forgotten, promotions never


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the controller may do. ``interval`` is in steps."""

    promote_above: float | None = 0.01
    scale_gradients: bool = True
    interval: int = 100
    underflow: float = 1e-3  # share of a gradient's elements that may round to zero before a refresh is due
    hi: str = "bf16"  # the format a promoted tensor gets


@dataclass
class Controller:
    """Precision state of one graph: its plan, its scale exponents, its latest statistics."""

    plan: Plan
    rules: Rules
    capacity: int  # rows of the scale table
    device: torch.device
    step: int = 0
    scale_exps: dict[int, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    queue: StatsQueue = field(default_factory=StatsQueue)
    latest: dict[int, SiteStats] = field(default_factory=dict)
    _amax: dict[int, float] = field(default_factory=dict)  # largest since the last refresh
    _last_refresh: int | None = None
    _table: torch.Tensor | None = None

    @property
    def table(self) -> torch.Tensor:
        """The current table; the same tensor until something changes."""
        if self._table is None:
            self._table = build_table(self.plan.sites, self.scale_exps, self.capacity, self.device)
        return self._table

    def begin_step(self) -> None:
        """Act on the statistics that have arrived: afterwards ``plan`` and ``table`` are those of this step."""
        self._read(wait=False)
        self.step += 1

    def _read(self, *, wait: bool) -> None:
        offenders: dict[int, SiteStats] = {}
        seen_gradients = False
        for stats in self.queue.poll(wait=wait):
            site = self.plan.sites[stats.site]
            if math.isnan(stats.amax):
                self._note_nan(site)
            self.latest[stats.site] = stats
            if site.direction == "backward":
                seen_gradients = True
                self._note_gradient(stats)
            elif self._overflows(site, stats):
                offenders[stats.site] = stats
        if offenders:
            self._promote(offenders)
        if seen_gradients and self._refresh_is_due():
            self._refresh_scales()

    def _overflows(self, site: Site, stats: SiteStats) -> bool:
        limit = self.rules.promote_above
        if limit is None or site.promoted_at is not None:
            return False
        # The ratio arrives in float32, where 1 in 100 is less than 0.01.
        return stats.overflow_ratio >= ctypes.c_float(limit).value or (math.isnan(stats.amax) and self._loses_nan(site))

    def _loses_nan(self, site: Site) -> bool:
        """Say whether storing a NaN turns it into a number (ALGORITHMS 1)."""
        return self.plan.storage == "packed" and parse(site.format).nan_code is None

    def _note_nan(self, site: Site) -> None:
        before = self.latest.get(site.id)
        if self._loses_nan(site) and (before is None or not math.isnan(before.amax)):
            self._tell("nan", site, f"NaN stored as {parse(site.format).largest:g}: {site.format} has no NaN")

    def _tell(self, kind: str, site: Site, detail: str) -> None:
        self.events.append(Event(self.step, kind, describe(site), detail))
        if len(self.events) > MAX_EVENTS:
            del self.events[next((i for i, e in enumerate(self.events) if e.kind != "promotion"), 0)]

    def _promote(self, offenders: Mapping[int, SiteStats]) -> None:
        hi = self.rules.hi
        moved = [i for i in offenders if self.plan.sites[i].format != hi]
        if not moved:
            return
        for i in moved:
            site = self.plan.sites[i]
            self._tell("promotion", site, f"{site.format} -> {hi}: overflow ratio {offenders[i].overflow_ratio:.4g}")
        self.plan = self.plan.promote(moved, step=self.step, hi=hi)
        self._table = None

    def promote_as(self, other: Plan) -> None:
        """Promote what another graph of the same model has promoted: evaluation follows training."""
        promoted = {(s.tensor, s.kind, s.group, s.module) for s in other.promoted}
        moved = [
            s.id for s in self.plan.sites if s.promoted_at is None and (s.tensor, s.kind, s.group, s.module) in promoted
        ]
        for i in moved:
            site = self.plan.sites[i]
            self._tell("promotion", site, f"{site.format} -> {self.rules.hi}: promoted in training")
        if moved:
            self.plan = self.plan.promote(moved, step=self.step, hi=self.rules.hi)
            self._table = None

    def _note_gradient(self, stats: SiteStats) -> None:
        if not (0.0 < stats.amax < math.inf):
            return
        site = stats.site
        # A maximum from before the scale went wrong says nothing of the gradient as it is now.
        self._amax[site] = stats.amax if self._is_off(stats) else max(self._amax.get(site, 0.0), stats.amax)
        if self._is_off(stats):
            self._last_refresh = None  # now, not at the next interval

    def _is_off(self, stats: SiteStats) -> bool:
        """Say whether the site's scale was never set, saturates, or lets too much underflow for no reason.

        A gradient that underflows to zero hides all that would come before it in the model, so sites get their
        first scale one after another.
        """
        wanted = scale_exp(stats.amax, parse(self.plan.sites[stats.site].format))
        now = self.scale_exps.get(stats.site)
        if wanted is None or wanted == now:
            return False
        if now is None or wanted < now - HEADROOM_EXP:
            return True
        return stats.underflow_ratio > self.rules.underflow and wanted > now + HEADROOM_EXP

    def _refresh_is_due(self) -> bool:
        if not self.rules.scale_gradients:
            return False
        return self._last_refresh is None or self.step - self._last_refresh >= self.rules.interval

    def _refresh_scales(self) -> None:
        changed: dict[int, int] = {}
        for site_id, amax in self._amax.items():
            k = scale_exp(amax, parse(self.plan.sites[site_id].format))
            if k is not None and k != self.scale_exps.get(site_id):
                changed[site_id] = k
        for site_id, k in changed.items():
            self._tell("scale", self.plan.sites[site_id], f"scale 2**{self.scale_exps.get(site_id, 0)} -> 2**{k}")
        self.scale_exps.update(changed)
        self._amax.clear()
        self._last_refresh = self.step
        if changed:
            self._table = None

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per site: format, module, scale exponent and the latest statistics (or None)."""
        self._read(wait=True)
        return [self._row(site) for site in self.plan.sites]

    def _row(self, site: Site) -> dict[str, Any]:
        stats = self.latest.get(site.id)
        return {
            "site": site.id,
            "tensor": site.tensor,
            "kind": site.kind,
            "module": site.module,
            "format": site.format,
            "scale_exponent": self.scale_exps.get(site.id, 0),
            "amax": None if stats is None else stats.amax,
            "overflow_ratio": None if stats is None else stats.overflow_ratio,
            "underflow_ratio": None if stats is None else stats.underflow_ratio,
            "promoted_at": site.promoted_at,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON data: everything that decides the numbers of the next step."""
        self._read(wait=True)
        return {
            "step": self.step,
            "last_refresh": self._last_refresh,
            "scale_exps": {str(k): v for k, v in sorted(self.scale_exps.items())},
            "amax": {str(k): v for k, v in sorted(self._amax.items())},
            "plan": self.plan.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a saved state. Raises `PlanError` for another model's state."""
        self._read(wait=True)
        plan = plan_of(state)
        difference = self.plan.first_difference(plan, there="the saved state", sizes=False)
        if difference is not None:
            raise PlanError(
                f"the saved state belongs to another model or config: {difference}; load it where it was saved from"
            )
        self.plan = plan
        self.step = state["step"]
        self._last_refresh = state["last_refresh"]
        self.scale_exps = {int(k): v for k, v in state["scale_exps"].items()}
        self._amax = {int(k): v for k, v in state["amax"].items()}
        self._table = None


def plan_of(state: Mapping[str, Any]) -> Plan:
    """Return the plan in a graph's saved state."""
    return from_dict(state["plan"])


def describe(site: Site) -> str:
    """Return ``tensor (module, source)`` for a message."""
    where = ", ".join(part for part in (site.module, site.source) if part)
    return f"{site.tensor} ({where})" if where else site.tensor
