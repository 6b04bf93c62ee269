"""Control one compiled graph's precision: promote tensors, move scales and record events.

The controller acts on statistics a fixed number of steps late. It knows sites and numbers, no FX.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxprec.errors import FxprecWarning, NonfiniteError
from fxprec.numerics.formats import parse
from fxprec.plan import Plan, Site
from fxprec.plan.compare import partners
from fxprec.plan.lines import named
from fxprec.plan.scales import ScaleGraph
from fxprec.runtime.controller_state import saved_plan
from fxprec.runtime.events import Event, RunEvents
from fxprec.runtime.nonfinite import Departure, NonfiniteWatch
from fxprec.runtime.scaling.copies import CopyScales
from fxprec.runtime.scaling.keeper import Keeper, casts_alike, largest_magnitude
from fxprec.runtime.scaling.record import UNSCALED
from fxprec.runtime.stats import SiteStats, StatsQueue, steps_late
from fxprec.runtime.table import Formats, Latest, ScaleTable, TableState

MAX_DEPARTURES = 100  # each has statistics of 200 steps, 40 KB
_REMEDY = {
    True: "check the batch; the tensor is promoted now",
    False: "check the batch, or hold the module high with keep_high",
}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a forward tensor is promoted, and to which format."""

    promote_above: float | None = 0.01
    hi: str = "bf16"  # the format a promoted tensor gets


@dataclass
class Controller:
    """Precision state of one graph: its plan, its scales, its latest statistics."""

    plan: Plan
    rules: Rules
    capacity: int  # rows of the scale table
    device: torch.device
    step: int = 0
    keeper: Keeper | None = None  # None where no gradient needs a scale
    copies: CopyScales | None = None  # None where no stored copy has a scale
    told: RunEvents = field(default_factory=RunEvents)
    queue: StatsQueue = field(default_factory=StatsQueue)
    nonfinite: NonfiniteWatch | None = None  # None: nobody asks which tensor left its range first
    latest: dict[int, SiteStats] = field(default_factory=dict)  # statistics acted on last, by row
    latest_step: int = 0  # step of the latest statistics
    _refused: frozenset[int] = frozenset()  # sites never promoted again, because compiling with the promotion failed
    _held: Mapping[int, str] = field(default_factory=dict)  # formats in force instead of the plan's, by site
    departures: deque[Departure] = field(default_factory=lambda: deque(maxlen=MAX_DEPARTURES))
    """The tensor that left its range first, one entry each time that an inf or a NaN appears, the latest of them."""
    _error: NonfiniteError | None = None  # raised by the next `settle`
    _told_of: int | None = None  # first site that stored an inf or a NaN as a number in the latest statistics

    def __post_init__(self) -> None:
        self._table = ScaleTable(self.device)
        self._by_row = Latest(_sites_by_row)
        self._without_scales: dict[int, tuple[torch.Tensor, TableState]] = {}  # tables by address, until scales exist

    @property
    def table(self) -> torch.Tensor:
        """Return the current table; the same tensor until something changes."""
        keeper = self.keeper
        formats = Formats(self.plan.sites, self.scales, self.capacity, tuple(self._held.items()))
        exps, measures = ((), False) if keeper is None else (tuple(keeper.exps), keeper.measures)
        copies = () if self.copies is None else self.copies.exps
        state = TableState(formats, exps, copies, measures)
        table = self._table.of(state)
        if keeper is not None and keeper.is_new:
            self._without_scales[table.data_ptr()] = table, state
        return table

    @property
    def events(self) -> list[Event]:
        """Return the recorded events, oldest first."""
        return self.told.events

    @property
    def scales(self) -> ScaleGraph | None:
        """Return the graph of scales, or None where no tensor has a scale."""
        scaled = self.keeper or self.copies
        return None if scaled is None else scaled.graph

    def hold(self, formats: Mapping[int, str]) -> None:
        """Round these sites to other formats than the plan's from the next step on; the plan stays.

        For experiments in storage ``simulate``: a format is a row of the table there, so nothing is recompiled.
        """
        assert self.plan.storage == "simulate"
        self._held = dict(formats)

    def settle(self) -> None:
        """Begin a step: act on the statistics that are due. ``plan`` and ``table`` are then those of this step.

        Statistics of step ``n`` are acted on `steps_late` steps later, whenever they arrive. The second step needs
        scales already, so it waits for the statistics of the first.
        """
        self.queue.close(self.step)
        waits = self.keeper is not None and self.step > 0 and self.keeper.waits
        self._act(keep=0 if waits else self._kept, wait=True)
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self.keeper is not None:
            self.keeper.update(self.step, self._tell_scale)

    def begin(self, gradients: Sequence[torch.Tensor], table: torch.Tensor) -> torch.Tensor:
        """Return the table of a backward pass: ``table``, its forward's, with gradients' scales if that had none yet.

        The first backward pass chooses the scales from ``gradients``, those that enter the graph. Stored copies keep
        the scales of ``table``, since statistics acted on in between may have changed the current table.
        """
        keeper, known = self.keeper, self._without_scales.get(table.data_ptr())
        if keeper is None or known is None:
            return table
        if keeper.is_new and (largest := largest_magnitude(gradients)) is not None:
            keeper.begin(largest, self.step, self._tell_scale)
        if keeper.is_new:
            return table
        return self._table.made(replace(known[1], exps=tuple(keeper.exps), measures=keeper.measures))

    def catch_up(self, *, wait: bool = True) -> None:
        """Act now on the statistics that the next step will act on, which changes no number.

        Evaluation, other graphs of the model and saved states then see the plan of the next step. Without ``wait``,
        stop at the first statistics that have not arrived.
        """
        self._act(keep=self._kept, wait=wait)

    def act_on_all(self) -> None:
        """Act on all pushed statistics, due or not; waits for the device."""
        self._act(keep=0, wait=True)

    @property
    def _kept(self) -> int:
        return steps_late(self.device) - 1

    def _act(self, *, keep: int, wait: bool) -> None:
        for step, arrived in self.queue.take(keep=keep, wait=wait):
            self.latest_step = self.step if step is None else step
            self._take(arrived, self.latest_step)

    def _take(self, arrived: Sequence[SiteStats], step: int) -> None:
        """Act on the statistics of one step."""
        offenders: dict[int, SiteStats] = {}
        lost: dict[int, SiteStats] = {}  # by site that stored an inf or a NaN as a number
        self.latest.update((stats.site, stats) for stats in arrived)
        if self.keeper is not None:
            noted = self.keeper.graph.noted
            for stats in arrived:
                if stats.site in noted:
                    self.keeper.note(stats, step)
        if self.copies is not None:
            for row, was, exp in self.copies.note(arrived, step, now=self.step + 1):
                self._tell_scale("scale", row, f"scale 2**{was} -> 2**{exp}")
        sites = self._sites()
        for stats in arrived:
            if not stats.overflow_ratio and math.isfinite(stats.amax):
                continue  # true of most statistics
            site = sites[stats.site]
            if site.direction == "forward" and self._overflows(site, stats, step):
                offenders[stats.site] = stats
            elif site.direction == "forward" and self._loses(site, stats.amax):
                lost.setdefault(site.id, stats)
        offenders |= self._where_it_came_from(lost)
        if offenders:
            self._promote(offenders)
        if self.nonfinite is not None:
            self._tell_who_was_first(self.nonfinite, arrived, step)

    def _tell_who_was_first(self, nonfinite: NonfiniteWatch, arrived: Sequence[SiteStats], step: int) -> None:
        """Record which tensor left its range first; warn, or let `settle` raise, as ``nonfinite.action`` says."""
        departure = nonfinite.note(step, arrived, self._sites())
        if departure is None:
            return
        self.departures.append(departure)
        self._tell("left-range", departure.site, departure.detail)
        message = f"{describe(departure.site)} {departure.detail}"
        if nonfinite.action == "raise":
            self._error = NonfiniteError(f"{message}; check the batch, or set on_nonfinite='report' to go on")
        if nonfinite.action == "report":
            warnings.warn(message, FxprecWarning, stacklevel=2)

    def _where_it_came_from(self, lost: Mapping[int, SiteStats]) -> dict[int, SiteStats]:
        """Record the first site of ``lost``, from which the others were computed; return it if it may be promoted."""
        first = min(lost, default=None)
        told, self._told_of = self._told_of, first
        if first is None:
            return {}
        site, stats = self.plan.sites[first], lost[first]
        if first != told:
            self._tell_of_nonfinite(site, stats)
        return {stats.site: stats} if self._may_move(site) else {}

    def scale_of(self, row: int) -> Mapping[str, Any] | None:
        """Return what is known of a row's scale, ``scale_exponent`` first; None where the row has no scale."""
        if self.keeper is not None and row in self.keeper.graph.casts:
            return self.keeper.describe(row)
        if self.copies is not None and row in self.copies:
            return {**UNSCALED, "scale_exponent": self.copies.of(row)}
        return None

    def site_of(self, row: int) -> Site:
        """Return the site that a row of statistics belongs to."""
        further = {} if self.keeper is None else self.keeper.graph.site_of
        return self.plan.sites[further.get(row, row)]

    def _sites(self) -> Mapping[int, Site]:
        """Return the site of each row."""
        return self._by_row((self.plan.sites, None if self.keeper is None else self.keeper.graph))

    def alert(self, site: int, rule: str, detail: str | None) -> None:
        """Record that a site breaks a rule, once until a call with ``detail`` None reports that the site keeps it."""
        self.told.alert(self.step, describe(self.plan.sites[site]), rule, detail)

    def _tell_scale(self, kind: str, site: int, detail: str) -> None:
        self._tell(kind, self.plan.sites[site], detail)

    def _overflows(self, site: Site, stats: SiteStats, step: int) -> bool:
        limit, exp = self.rules.promote_above, 0 if self.copies is None else self.copies.at(site.id, step)
        if exp > 0:
            return False  # the copy's own scale caused the overflow and is lowered instead
        if not stats.overflow_ratio or limit is None or not self._may_move(site):
            return False
        # An inf or a NaN counts as overflow, but it shows a bad batch, not a format that is too narrow. The ratio
        # arrives in float32, where 1 in 100 is less than 0.01. A copy that was scaled down bears no overflow at all.
        return math.isfinite(stats.amax) and (exp < 0 or stats.overflow_ratio >= ctypes.c_float(limit).value)

    def _may_move(self, site: Site) -> bool:
        """Return whether a site may be promoted."""
        return self.rules.promote_above is not None and site.format != self.rules.hi and site.id not in self._refused

    def _loses(self, site: Site, amax: float) -> bool:
        """Return whether ``amax`` is an inf or NaN that storing turns into a number."""
        if math.isfinite(amax):
            return False
        fmt = parse(site.format)
        if math.isinf(amax):
            return fmt.overflow == "saturate"
        return math.isnan(amax) and self.plan.storage == "packed" and fmt.nan_code is None

    def _tell_of_nonfinite(self, site: Site, stats: SiteStats) -> None:
        kind, what = ("nan", "NaN") if math.isnan(stats.amax) else ("nonfinite", "inf")
        detail = f"{what} stored as {parse(site.format).largest:g}: {site.format} has no {what}"
        self._tell(kind, site, detail, f"forward sees the {what}, backward the number; {_REMEDY[self._may_move(site)]}")

    def _tell(self, kind: str, site: Site, detail: str, advice: str = "") -> None:
        self.told.tell(Event(self.step, kind, describe(site), detail), advice)

    def _promote(self, offenders: Mapping[int, SiteStats]) -> None:
        hi = self.rules.hi
        for i, stats in offenders.items():
            site = self.plan.sites[i]
            self._tell("promotion", site, f"{site.format} -> {hi}: overflow ratio {stats.overflow_ratio:.4g}")
        self.plan = self.plan.promote([*offenders], step=self.step, hi=hi)

    def begin_with_scales(self, other: Controller) -> None:
        """Start stored copies with the scales that another graph of the same model has found for them."""
        if self.copies is None or other.copies is None:
            return
        pairs = partners(self.plan, other.plan).items()
        self.copies.begin_with({i: other.copies.of(j) for i, j in pairs if j in other.copies})

    def promote_as(self, other: Plan, why: str) -> None:
        """Promote the tensors that another graph of the same model has promoted; ``why`` goes into the events."""
        promoted = {i for i, j in partners(self.plan, other).items() if other.sites[j].promoted_at is not None}
        moved = [s.id for s in self.plan.sites if s.id in promoted - self._refused and s.format != self.rules.hi]
        for i in moved:
            site = self.plan.sites[i]
            self._tell("promotion", site, f"{site.format} -> {self.rules.hi}: {why}")
        if moved:
            self.plan = self.plan.promote(moved, step=self.step, hi=self.rules.hi)

    def stay_with(self, plan: Plan) -> list[Site]:
        """Return to an earlier plan of the same sites. Never promote again the sites that differ; return them."""
        changed = [was for site, was in zip(self.plan.sites, plan.sites, strict=True) if site.format != was.format]
        self._refused |= {site.id for site in changed}
        self.plan = plan
        return changed

    def adopt(
        self, plan: Plan, keeper: Keeper | None, capacity: int | None = None, copies: CopyScales | None = None
    ) -> None:
        """Take the plan of newly compiled code. Scales stay as they are if the new code casts the same gradients.

        ``capacity`` is the number of rows of its table; None: as before. Statistics are dropped if rows or casts
        differ, because their row numbers then mean other tensors.
        """
        if not (self._rows_alike(plan) and casts_alike(self.keeper, keeper)):
            self.queue.forget()
            self._forget_statistics()
        self.capacity = self.capacity if capacity is None else capacity
        if self.keeper is not None and keeper is not None and casts_alike(self.keeper, keeper):
            self.keeper.graph = keeper.graph  # stored operands may differ, and with them the slots
        else:
            self.keeper = keeper
        if copies is not None and self.copies is not None:
            copies.take_from(self.copies)
        self.copies = copies
        self.plan = plan

    def _forget_statistics(self) -> None:
        self.latest.clear()
        if self.nonfinite is not None:
            self.nonfinite.forget()

    def _rows_alike(self, plan: Plan) -> bool:
        ours, theirs = ([(s.tensor, s.kind, s.module) for s in p.sites] for p in (self.plan, plan))
        return ours == theirs

    def rows(self, *, wait: bool = True) -> list[dict[str, Any]]:
        """Return one row per cast: site, format, module, scale and the latest statistics (or None).

        A site has one cast, or in ``simulate`` one for each consumer of its value. With ``wait``, wait for statistics
        that are still on their way from the device. They are shown now and acted on when they are due.
        """
        self.catch_up(wait=wait)
        latest = {**self.latest, **{stats.site: stats for stats in self.queue.peek(wait=wait)}}
        rows = [self._row(site, site.id, latest) for site in self.plan.sites]
        if self.keeper is not None:
            further = sorted(row for row in self.keeper.graph.casts if row >= len(self.plan.sites))
            rows += [self._row(self.site_of(row), row, latest) for row in further]
        return rows

    def _row(self, site: Site, row: int, latest: Mapping[int, SiteStats]) -> dict[str, Any]:
        stats = latest.get(row)
        scale = self.scale_of(row) or UNSCALED
        return {
            "site": site.id,
            "tensor": site.tensor,
            "kind": site.kind,
            "module": site.module,
            "format": site.stored_as,
            "amax": None if stats is None else stats.amax,
            "overflow_ratio": None if stats is None else stats.overflow_ratio,
            "underflow_ratio": None if stats is None or math.isnan(stats.underflow_ratio) else stats.underflow_ratio,
            "promoted_at": site.promoted_at,
            **scale,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the numbers of later steps, as plain JSON data.

        Statistics that are not due are saved as they are. After loading, the same step acts on them as without saving.
        """
        self.catch_up()
        return {
            "step": self.step,
            "scales": None if self.keeper is None else self.keeper.state_dict(),
            "copies": {} if self.copies is None else self.copies.state_dict(),
            "plan": self.plan.to_dict(),
            "pending": self.queue.state(),
            "refused": sorted(self._refused),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. Raises `PlanError` for another model's state."""
        plan = self.refuse_another(state)
        self.queue.load(state.get("pending", ()))
        self._forget_statistics()
        self._error = self._told_of = None
        self._refused = frozenset(state.get("refused", ()))
        self.plan = plan
        self.step = state["step"]
        if self.keeper is not None:
            self.keeper.load_state_dict(state["scales"])
        if self.copies is not None:
            self.copies.load_state_dict(state.get("copies", {}))

    def refuse_another(self, state: Mapping[str, object]) -> Plan:
        """Return the plan of a saved state of this graph. Raises `PlanError` for any other state."""
        return saved_plan(state, self.plan, self.keeper)


def _sites_by_row(known: tuple[tuple[Site, ...], ScaleGraph | None]) -> Mapping[int, Site]:
    sites, graph = known
    further = {} if graph is None else {row: sites[i] for row, i in graph.site_of.items()}
    return {**dict(enumerate(sites)), **further}


def describe(site: Site) -> str:
    """Return ``tensor (module, source)`` for a message."""
    return named(site.tensor, site.module, site.source)
