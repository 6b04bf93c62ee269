"""Keep the scales of one graph's gradients while training runs: decide when to measure and when to solve scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from fxprec.config.grad_scaling import GradScaling, LossScaling
from fxprec.numerics.formats import parse
from fxprec.plan.scales import Cast, ScaleGraph
from fxprec.runtime.scaling.estimates import floor_log2
from fxprec.runtime.scaling.histogram import Histogram
from fxprec.runtime.scaling.loss_scaling import LossScaleKeeper
from fxprec.runtime.scaling.record import PATIENCE, Record, Refresh, from_state, to_state
from fxprec.runtime.scaling.solver import (
    FOOTROOM_EXP,
    HEADROOM_EXP,
    MAX_SCALE_EXP,
    CastStatistics,
    first_exps,
    hidden_by_clipping,
    scale_exp,
    solve,
    within_reach,
)
from fxprec.runtime.stats import SiteStats

# Most refreshes in a row. Gradients computed from one that underflows to zero are unknown, so the first scales take a
# few steps.
MAX_SETTLING = 8
# Share of underflow above which the next refresh comes at once.
GROSS_UNDERFLOW = 0.05
AT_ONCE_ABOVE = 0.01
# Share of overflow from which a gradient is too large as a whole, so that everything computed from it is too small.
GROSS_OVERFLOW = 0.25
Tell = Callable[[str, int, str], None]  # (kind of event, site, detail)


class Keeper(Protocol):
    """Scale exponents of one graph, by variable of its `ScaleGraph`."""

    graph: ScaleGraph
    exps: list[int]

    @property
    def measures(self) -> bool:
        """Return whether the coming step measures moments."""

    @property
    def waits(self) -> bool:
        """Return whether the next step waits for the statistics that are on their way."""

    @property
    def is_new(self) -> bool:
        """Return whether no scale was chosen yet, so that `begin` chooses them."""

    def begin(self, amax: float, step: int, tell: Tell) -> None:
        """Choose the scales of step number ``step``, whose backward pass begins.

        ``amax`` is the largest magnitude of the gradients that enter the graph.
        """

    def ask(self) -> None:
        """Measure in the coming step, even if no refresh is due."""

    def note(self, stats: SiteStats, step: int) -> None:
        """Take one row's statistics of a step, those of a gradient or of a GEMM's operand."""

    def update(self, step: int, tell: Tell) -> None:
        """Act on the noted statistics before step number ``step`` begins."""

    def describe(self, row: int) -> dict[str, object]:
        """Return what `Backend.stats` shows of a cast."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`."""


def keeper_of(scaling: GradScaling | LossScaling, graph: ScaleGraph, at_once_above: float | None) -> Keeper:
    """Return the keeper of the scales that ``scaling`` describes.

    ``at_once_above`` is the overflow ratio from which a scale is lowered without waiting for a refresh; None: 0.01.
    """
    if isinstance(scaling, LossScaling):
        return LossScaleKeeper(scaling, graph)
    return ScaleKeeper(scaling, graph, AT_ONCE_ABOVE if at_once_above is None else at_once_above)


@dataclass
class ScaleKeeper(Keeper):
    """A keeper with one scale per cast, solved every ``interval`` steps and once right after the first step."""

    scaling: GradScaling
    graph: ScaleGraph
    at_once_above: float  # overflow ratio that lowers a scale at once
    exps: list[int] = field(default_factory=list)
    _records: dict[int, Record] = field(default_factory=dict)  # by row, of casts and of their GEMMs' operands
    _refused: set[int] = field(default_factory=set)  # rows of casts whose scale was out of reach at the last refresh
    _due: bool = True
    _settling: int = 0  # refreshes in a row
    _last_refresh: int = 0
    _in_force_since: int = 0  # steps before this one ran with other exponents
    _seen: bool = False  # whether statistics of any cast have arrived, even of zeros

    def __post_init__(self) -> None:
        if not self.exps:
            self.exps = [0] * len(self.graph.variables)

    @property
    def measures(self) -> bool:
        return self._due

    @property
    def waits(self) -> bool:
        return not self._seen  # the second step needs scales

    @property
    def is_new(self) -> bool:
        return not (self._last_refresh or any(self.exps) or any(row in self._records for row in self.graph.casts))

    def begin(self, amax: float, step: int, tell: Tell) -> None:
        self._change(first_exps(self.graph, amax), step - 1, tell)

    @property
    def _fresh(self) -> frozenset[int]:
        """Return the casts measured since the last refresh, by row."""
        return frozenset(row for row, record in self._records.items() if record.is_fresh)

    def ask(self) -> None:
        self._due, self._settling = True, 0

    def note(self, stats: SiteStats, step: int) -> None:
        row = stats.site
        is_cast = row in self.graph.casts
        self._seen = self._seen or is_cast
        if not (is_cast or row in self.graph.operands) or not 0.0 < stats.amax < math.inf:
            if stats.amax == 0.0 and row in self._records and self._records[row].recent:
                self._records[row].recent.append(0.0)
            return  # zeros have no magnitude, and a bad batch must not set scales
        record = self._records.setdefault(row, Record())
        if stats.is_measured and (
            step >= self._in_force_since or not is_cast
        ):  # losses under other scales are out of date
            record.measured = stats
            record.is_fresh = is_cast
        if is_cast:
            self._note_cast(row, record, stats)
        else:
            record.note_amax(stats.amax)

    def _note_cast(self, row: int, record: Record, stats: SiteStats) -> None:
        if not self._last_refresh:
            record.lost = stats.overflow_ratio + stats.underflow_ratio
        off = stats.overflow_ratio >= self.at_once_above
        low = stats.underflow_ratio > GROSS_UNDERFLOW
        is_small = low and math.ldexp(stats.amax, HEADROOM_EXP) < record.peak
        record.small = record.small + 1 if is_small else 0
        # A maximum from before the scale went wrong does not describe the present gradient.
        record.note_amax(stats.amax, forget=off or record.small >= PATIENCE)
        if off:
            record.recent.clear()
        record.recent.append(stats.amax)
        if off:
            record.saturating = stats.amax
            if stats.overflow_ratio >= GROSS_OVERFLOW:
                record.clipped = self._excess(row, stats.amax)
        elif low and self._can_rise(row, record.peak):
            self._due, self._settling = True, 0

    def _excess(self, row: int, amax: float) -> int:
        """Return by how many binades ``amax`` at its scale exceeds the format's largest number."""
        variable = self.graph.casts[row]
        return max(0, floor_log2(amax) + self.exps[variable] - floor_log2(parse(self._cast(variable).format).largest))

    def _can_rise(self, row: int, peak: float) -> bool:
        variable = self.graph.casts[row]
        cap = scale_exp(peak, parse(self._cast(variable).format))
        return cap is not None and self.exps[variable] < min(cap, MAX_SCALE_EXP)

    def _cast(self, variable: int) -> Cast:
        found = self.graph.variables[variable]
        assert isinstance(found, Cast)
        return found

    def update(self, step: int, tell: Tell) -> None:
        if not self._last_refresh:
            self._tell_what_was_lost(tell)
        if self._fresh:
            self._refresh(step, tell)
        elif any(record.saturating is not None for record in self._records.values()):
            self._lower(step, tell)
        for record in self._records.values():
            record.acted_on()
        self._due = self._due or step + 1 - self._last_refresh >= self.scaling.interval

    def _tell_what_was_lost(self, tell: Tell) -> None:
        """Record what the steps before the first measurement lost. Their scales were guessed by `begin`, or none."""
        lost = {row: r.lost for row, r in self._records.items() if r.lost is not None and r.lost >= GROSS_OVERFLOW}
        if lost:
            worst = max(lost, key=lambda row: lost[row])
            detail = (
                f"{len(lost)} of {len(self.graph.casts)} gradients lost {GROSS_OVERFLOW:.0%} or more of their elements "
                f"to over- or underflow, this one {lost[worst]:.0%}: a first step has no measured scales yet"
            )
            tell("unscaled", self.graph.site_of[worst], detail)
        for record in self._records.values():
            record.lost = None

    @property
    def _clipped(self) -> dict[int, int]:
        """Return the binades by which casts saturated as a whole, by row."""
        return {row: r.clipped for row, r in self._records.items() if r.clipped is not None}

    def _lower(self, step: int, tell: Tell) -> None:
        """Lower the scales of saturating casts now, by their largest magnitudes. Other casts wait for a refresh.

        Gradients computed from one that saturated as a whole are larger than they seemed, so their scales follow.
        """
        carried, into = hidden_by_clipping(self.graph, self._clipped)
        exps: list[int] = []
        for i, variable in enumerate(self.graph.variables):
            wanted = self.exps[i]
            if isinstance(variable, Cast):
                saturating = self._record(variable.row).saturating or 0.0
                cap = scale_exp(saturating, parse(variable.format))
                wanted = (wanted if cap is None else min(wanted, cap)) - into[variable.row]
            else:
                wanted -= carried[i]
            exps.append(within_reach(variable, wanted, exps))
        self._change(exps, step, tell)
        self._due, self._settling = True, 0

    def _refresh(self, step: int, tell: Tell) -> None:
        stats = {row: r.measured for row, r in self._records.items() if r.measured is not None}
        measured = CastStatistics(stats, self._peaks(stats), self._histograms(stats), self._fresh)
        self._adapt_margins(measured)
        margins = {row: record.margin for row, record in self._records.items()}
        _, hidden = hidden_by_clipping(self.graph, self._clipped)
        limit = self.scaling.underflow
        found = solve(self.graph, measured.unclipped(hidden), limit, margins, self.exps)
        moved = self._change(found.exps, step, tell)
        self._tell_refused(found.refused, tell)
        for row, variable in self.graph.casts.items():
            self._remember(row, variable, measured, step)
        unknown = any(row not in stats for row in self.graph.casts)
        self._settling += 1
        self._due = (unknown or moved > HEADROOM_EXP) and self._settling < MAX_SETTLING
        if not self._due:
            self._settling = 0
        self._last_refresh = step
        for record in self._records.values():
            record.refreshed()

    def _record(self, row: int) -> Record:
        return self._records.get(row) or Record()

    def _tell_refused(self, refused: Mapping[int, int], tell: Tell) -> None:
        for row in refused.keys() - self._refused:
            wanted, given = refused[row], self.exps[self.graph.casts[row]]
            detail = (
                f"scale 2**{wanted} is needed and 2**{given} is used, the limit of float32's range: part of this "
                f"gradient {'overflows' if wanted < given else 'underflows'}; multiply the loss by 2**{wanted - given} "
                "or so"
            )
            tell("clamp", self.graph.site_of[row], detail)
        self._refused = set(refused)

    def _peaks(self, measured: Mapping[int, SiteStats]) -> dict[int, float]:
        """Return the largest magnitude by row: the record's peak, or else that of the last measurement."""
        seen = {row: record.peak for row, record in self._records.items() if record.is_seen}
        return {row: stats.amax for row, stats in measured.items()} | seen

    def _histograms(self, measured: Mapping[int, SiteStats]) -> dict[int, Histogram]:
        return {
            row: Histogram.of(stats.counts, stats.amax, parse(self._cast(self.graph.casts[row]).format))
            for row, stats in measured.items()
            if stats.counts and row in self.graph.casts
        }

    def _adapt_margins(self, measured: CastStatistics) -> None:
        """Raise the margin of a cast that underflows more than the model predicted; lower it slowly."""
        limit = self.scaling.underflow
        for row in self._fresh:
            variable, record = self.graph.casts[row], self._records[row]
            distribution = measured.distribution(self._cast(variable))
            if distribution is None:
                continue
            lost = underflow_of(measured.stats[row])
            if lost > limit >= distribution.underflow(self.exps[variable]):
                record.margin += FOOTROOM_EXP
            elif record.margin and lost < limit / 64:
                record.margin -= 1

    def _change(self, exps: list[int], step: int, tell: Tell) -> int:
        """Put new exponents in force after step ``step``; return the largest change of a cast."""
        moved = 0
        for row, variable in self.graph.casts.items():
            was, now = self.exps[variable], exps[variable]
            if was != now:
                moved = max(moved, abs(now - was))
                tell("scale", self.graph.site_of[row], f"scale 2**{was} -> 2**{now}")
        if exps != self.exps:
            self._in_force_since = step + 1
        self.exps = exps
        return moved

    def _remember(self, row: int, variable: int, measured: CastStatistics, step: int) -> None:
        distribution, stats = measured.distribution(self._cast(variable)), measured.stats.get(row)
        if distribution is None or stats is None:
            return
        exp = self.exps[variable]
        entry = Refresh(
            step=step,
            scale_exponent=exp,
            estimated_underflow=distribution.underflow(exp),
            estimated_overflow=distribution.overflow(exp),
            measured_underflow=underflow_of(stats),
            overflow=stats.overflow_ratio,
        )
        self._records[row].history.append(entry)

    def describe(self, row: int) -> dict[str, Any]:
        past = self._record(row).history
        return {
            "scale_exponent": self.exps[self.graph.casts[row]],
            "estimated_underflow": past[-1].estimated_underflow if past else None,
            "estimated_overflow": past[-1].estimated_overflow if past else None,
            "history": [asdict(entry) for entry in past],
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "exps": list(self.exps),
            **to_state(self._records),
            "due": self._due,
            "settling": self._settling,
            "last_refresh": self._last_refresh,
            "in_force_since": self._in_force_since,
            "seen": self._seen,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.exps = list(state["exps"])
        self._records = from_state(state)
        self._due, self._settling, self._last_refresh = state["due"], state["settling"], state["last_refresh"]
        self._in_force_since = state.get("in_force_since", 0)  # older states have no statistics of other exponents
        self._seen = state.get("seen", self._last_refresh > 0)  # older versions waited until the first refresh


def underflow_of(stats: SiteStats) -> float:
    """Return the share of the non-zero elements that underflowed, from a step that measured."""
    return min(1.0, stats.underflow_ratio / stats.nonzero_ratio) if stats.nonzero_ratio > 0 else 0.0


def largest_magnitude(gradients: Iterable[torch.Tensor]) -> float | None:
    """Return the largest magnitude in any of the tensors, or None where it is 0, inf or NaN; waits for the device."""
    norms = [torch.linalg.vector_norm(g, math.inf).float() for g in gradients if g.is_floating_point() and g.numel()]
    largest = float(torch.stack(norms).amax()) if norms else 0.0
    return largest if 0.0 < largest < math.inf else None


def casts_alike(keeper: Keeper | None, other: Keeper | None) -> bool:
    """Return whether two graphs cast the same gradients; None: a graph whose gradients have no scales."""
    if keeper is None or other is None:
        return keeper is other
    return keeper.graph.casts_alike(other.graph)
