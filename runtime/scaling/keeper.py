"""The scales of one graph's gradients while training runs: when to measure, when to solve, what to remember."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from fxprec.config.grad_scaling import GradScaling, LossScaling
from fxprec.numerics.formats import parse
from fxprec.plan.scales import Cast, ScaleGraph
from fxprec.runtime.scaling.estimates import floor_log2
from fxprec.runtime.scaling.histogram import Histogram
from fxprec.runtime.scaling.loss_scaling import LossScaleKeeper
from fxprec.runtime.scaling.solver import (
    FOOTROOM_EXP,
    HEADROOM_EXP,
    MAX_SCALE_EXP,
    Measured,
    hidden_by_clipping,
    scale_exp,
    solve,
    within_reach,
)
from fxprec.runtime.stats import SiteStats

# A gradient that underflows to zero hides what comes before it in the model, so the first scales take a few steps.
MAX_SETTLING = 8
# Share of underflow at which waiting for the next refresh would cost too much.
GROSS_UNDERFLOW = 0.05
AT_ONCE_ABOVE = 0.01
# Share of overflow from which a gradient is too large as a whole, and all that is computed from it too small.
GROSS_OVERFLOW = 0.25
# Steps of gross underflow in a row after which the largest gradient seen since the last refresh counts no more.
PATIENCE = 8
HISTORY = 1000  # refreshes remembered per cast

Tell = Callable[[str, int, str], None]  # (kind of event, site, detail)


@dataclass(frozen=True, slots=True)
class Refresh:
    """One cast at one refresh: the exponent chosen, and what was estimated and measured for it.

    Shares are of the non-zero elements; ``measured_underflow`` and ``overflow`` are those of the step measured, at
    the exponent in force then.
    """

    step: int
    scale_exponent: int
    estimated_underflow: float
    estimated_overflow: float
    measured_underflow: float
    overflow: float


class Keeper(Protocol):
    """Scale exponents of one graph, by variable of its `ScaleGraph`."""

    graph: ScaleGraph
    exps: list[int]

    @property
    def measures(self) -> bool:
        """Whether the coming step measures moments."""

    @property
    def waits(self) -> bool:
        """Whether the statistics on their way are worth waiting for."""

    def ask(self) -> None:
        """Measure in the coming step, whenever the next refresh would be."""

    def note(self, stats: SiteStats) -> None:
        """Take one row's statistics, gradients and operands alike."""

    def update(self, step: int, tell: Tell) -> None:
        """Act on what was noted, before step number ``step`` begins."""

    def describe(self, row: int) -> dict[str, Any]:
        """Return what `Backend.stats` shows of a cast."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take `state_dict`'s result."""


def keeper_of(scaling: GradScaling | LossScaling, graph: ScaleGraph, at_once_above: float | None) -> Keeper:
    """Return what keeps the scales that ``scaling`` asks for.

    ``at_once_above`` is the overflow ratio from which a scale is lowered without waiting for a refresh; None: 0.01.
    """
    if isinstance(scaling, LossScaling):
        return LossScaleKeeper(scaling, graph)
    return ScaleKeeper(scaling, graph, AT_ONCE_ABOVE if at_once_above is None else at_once_above)


@dataclass
class ScaleKeeper:
    """A scale of its own for every cast, solved every ``interval`` steps and once right after the first."""

    scaling: GradScaling
    graph: ScaleGraph
    at_once_above: float  # overflow ratio that lowers a scale at once
    exps: list[int] = field(default_factory=list)
    _measured: dict[int, SiteStats] = field(default_factory=dict)  # the last good measurement, by row
    _amax: dict[int, float] = field(default_factory=dict)  # largest since the last refresh
    _margins: dict[int, int] = field(default_factory=dict)
    _saturating: dict[int, float] = field(default_factory=dict)  # row -> its largest magnitude, to act on at once
    _clipped: dict[int, int] = field(default_factory=dict)  # row -> binades by which the whole of it saturated
    _lost: dict[int, float] = field(default_factory=dict)  # row -> share lost, before the first scales
    _recent: dict[int, deque[float]] = field(default_factory=dict)  # row -> largest magnitudes of the last steps
    _small: dict[int, int] = field(default_factory=dict)  # row -> steps in a row it was far below its largest
    _refused: set[int] = field(default_factory=set)  # rows of casts that wanted another scale at the last refresh
    _fresh: set[int] = field(default_factory=set)  # casts measured since the last refresh
    _due: bool = True
    _settling: int = 0  # refreshes in a row
    _last_refresh: int = 0
    _history: dict[int, deque[Refresh]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.exps:
            self.exps = [0] * len(self.graph.variables)

    @property
    def measures(self) -> bool:
        return self._due

    @property
    def waits(self) -> bool:
        return self._last_refresh == 0 and not self._fresh  # step 2 is to be scaled

    def ask(self) -> None:
        self._due, self._settling = True, 0

    def note(self, stats: SiteStats) -> None:
        row = stats.site
        is_cast = row in self.graph.casts
        if not (is_cast or row in self.graph.operands) or not 0.0 < stats.amax < math.inf:
            if stats.amax == 0.0 and row in self._recent:
                self._recent[row].append(0.0)
            return  # zeros say nothing, and a bad batch must not decide
        if stats.is_measured:
            self._measured[row] = stats
            if is_cast:
                self._fresh.add(row)
        if is_cast:
            self._note_cast(row, stats)
        else:
            self._amax[row] = max(self._amax.get(row, 0.0), stats.amax)

    def _note_cast(self, row: int, stats: SiteStats) -> None:
        if not self._last_refresh:
            self._lost[row] = stats.overflow_ratio + stats.underflow_ratio
        off = stats.overflow_ratio >= self.at_once_above
        low = stats.underflow_ratio > GROSS_UNDERFLOW
        self._small[row] = self._small.get(row, 0) + 1 if low and self._is_far_below_the_largest(row, stats.amax) else 0
        # A maximum from before the scale went wrong says nothing of the gradient as it is now.
        forget = off or self._small[row] >= PATIENCE
        self._amax[row] = stats.amax if forget else max(self._amax.get(row, 0.0), stats.amax)
        recent = self._recent.setdefault(row, deque(maxlen=PATIENCE))
        if off:
            recent.clear()
        recent.append(stats.amax)
        if off:
            self._saturating[row] = stats.amax
            if stats.overflow_ratio >= GROSS_OVERFLOW:
                self._clipped[row] = self._excess(row, stats.amax)
        elif low and self._can_rise(row):
            self._due, self._settling = True, 0

    def _is_far_below_the_largest(self, row: int, amax: float) -> bool:
        return math.ldexp(amax, HEADROOM_EXP) < self._peak(row)

    def _peak(self, row: int) -> float:
        """Return the largest magnitude since the last refresh and of the last steps: losses may take turns."""
        return max(self._amax.get(row, 0.0), *self._recent.get(row, ()), 0.0)

    def _excess(self, row: int, amax: float) -> int:
        """Return by how many binades ``amax`` at its scale lies beyond the format's largest number."""
        variable = self.graph.casts[row]
        return max(0, floor_log2(amax) + self.exps[variable] - floor_log2(parse(self._cast(variable).format).largest))

    def _can_rise(self, row: int) -> bool:
        variable = self.graph.casts[row]
        cap = scale_exp(self._peak(row), parse(self._cast(variable).format))
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
        elif self._saturating:
            self._lower(tell)
        self._saturating.clear()
        self._clipped.clear()
        self._due = self._due or step + 1 - self._last_refresh >= self.scaling.interval

    def _tell_what_was_lost(self, tell: Tell) -> None:
        """Before anything was measured nothing is scaled: say what that cost."""
        lost = {row: share for row, share in self._lost.items() if share >= GROSS_OVERFLOW}
        if lost:
            worst = max(lost, key=lambda row: lost[row])
            detail = (
                f"{len(lost)} of {len(self.graph.casts)} gradients lost {GROSS_OVERFLOW:.0%} or more of their elements "
                f"to over- or underflow, this one {lost[worst]:.0%}: a first step has no scales yet"
            )
            tell("unscaled", self.graph.site_of[worst], detail)
        self._lost.clear()

    def _lower(self, tell: Tell) -> None:
        """Lower the scales of saturating casts now, by their largest magnitudes; the others wait for a refresh.

        What is computed from a gradient that saturated as a whole is larger than it seemed: its scales go along.
        """
        carried, into = hidden_by_clipping(self.graph, self._clipped)
        exps: list[int] = []
        for i, variable in enumerate(self.graph.variables):
            wanted = self.exps[i]
            if isinstance(variable, Cast):
                cap = scale_exp(self._saturating.get(variable.row, 0.0), parse(variable.format))
                wanted = (wanted if cap is None else min(wanted, cap)) - into[variable.row]
            else:
                wanted -= carried[i]
            exps.append(within_reach(variable, wanted, exps))
        self._change(exps, tell)
        self._due, self._settling = True, 0

    def _refresh(self, step: int, tell: Tell) -> None:
        measured = Measured(self._measured, self._peaks(), self._histograms(), frozenset(self._fresh))
        self._adapt_margins(measured)
        _, hidden = hidden_by_clipping(self.graph, self._clipped)
        limit = self.scaling.underflow
        found = solve(self.graph, measured.unclipped(hidden), limit, self._margins, self.exps)
        moved = self._change(found.exps, tell)
        self._tell_refused(found.refused, tell)
        for row, variable in self.graph.casts.items():
            self._remember(row, variable, measured, step)
        unknown = any(row not in self._measured for row in self.graph.casts)
        self._settling += 1
        self._due = (unknown or moved > HEADROOM_EXP) and self._settling < MAX_SETTLING
        if not self._due:
            self._settling = 0
        self._fresh.clear()
        self._last_refresh = step
        self._amax.clear()
        self._small.clear()

    def _tell_refused(self, refused: Mapping[int, int], tell: Tell) -> None:
        for row in refused.keys() - self._refused:
            wanted, given = refused[row], self.exps[self.graph.casts[row]]
            detail = (
                f"scale 2**{wanted} wanted, 2**{given} given, float32 having no more range: part of this gradient "
                f"{'overflows' if wanted < given else 'underflows'}; multiply the loss by 2**{wanted - given} or so"
            )
            tell("clamp", self.graph.site_of[row], detail)
        self._refused = set(refused)

    def _peaks(self) -> dict[int, float]:
        """Return the largest magnitude by row: since the last refresh, or when last measured."""
        seen = {row: self._peak(row) for row in self._amax.keys() | self._recent.keys()}
        return {row: stats.amax for row, stats in self._measured.items()} | seen

    def _histograms(self) -> dict[int, Histogram]:
        return {
            row: Histogram.of(stats.counts, stats.amax, parse(self._cast(self.graph.casts[row]).format))
            for row, stats in self._measured.items()
            if stats.counts and row in self.graph.casts
        }

    def _adapt_margins(self, measured: Measured) -> None:
        """Raise an exponent where the model says it is high enough but too many underflowed; lower it slowly."""
        limit = self.scaling.underflow
        for row in self._fresh:
            variable = self.graph.casts[row]
            distribution = measured.distribution(self._cast(variable))
            if distribution is None:
                continue
            lost, margin = underflow_of(self._measured[row]), self._margins.get(row, 0)
            if lost > limit >= distribution.underflow(self.exps[variable]):
                self._margins[row] = margin + FOOTROOM_EXP
            elif margin and lost < limit / 64:
                self._margins[row] = margin - 1

    def _change(self, exps: list[int], tell: Tell) -> int:
        """Put new exponents in force; return the largest change of a cast."""
        moved = 0
        for row, variable in self.graph.casts.items():
            was, now = self.exps[variable], exps[variable]
            if was != now:
                moved = max(moved, abs(now - was))
                tell("scale", self.graph.site_of[row], f"scale 2**{was} -> 2**{now}")
        self.exps = exps
        return moved

    def _remember(self, row: int, variable: int, measured: Measured, step: int) -> None:
        distribution, stats = measured.distribution(self._cast(variable)), self._measured.get(row)
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
        self._history.setdefault(row, deque(maxlen=HISTORY)).append(entry)

    def describe(self, row: int) -> dict[str, Any]:
        past = self._history.get(row, ())
        return {
            "scale_exponent": self.exps[self.graph.casts[row]],
            "estimated_underflow": past[-1].estimated_underflow if past else None,
            "estimated_overflow": past[-1].estimated_overflow if past else None,
            "history": [asdict(entry) for entry in past],
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "exps": list(self.exps),
            "measured": [{**asdict(stats), "counts": list(stats.counts)} for stats in self._measured.values()],
            "amax": {str(k): v for k, v in self._amax.items()},
            "margins": {str(k): v for k, v in self._margins.items()},
            "saturating": {str(k): v for k, v in self._saturating.items()},
            "clipped": {str(k): v for k, v in self._clipped.items()},
            "recent": {str(k): list(v) for k, v in self._recent.items()},
            "small": {str(k): v for k, v in self._small.items()},
            "fresh": sorted(self._fresh),
            "due": self._due,
            "settling": self._settling,
            "last_refresh": self._last_refresh,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.exps = list(state["exps"])
        rows = (SiteStats(**{**stats, "counts": tuple(stats["counts"])}) for stats in state["measured"])
        self._measured = {stats.site: stats for stats in rows}
        self._amax = {int(k): v for k, v in state["amax"].items()}
        self._margins = {int(k): v for k, v in state["margins"].items()}
        self._saturating = {int(k): v for k, v in state["saturating"].items()}
        self._clipped = {int(k): v for k, v in state.get("clipped", {}).items()}
        self._recent = {int(k): deque(v, PATIENCE) for k, v in state.get("recent", {}).items()}
        self._small = {int(k): v for k, v in state.get("small", {}).items()}
        self._fresh, self._due = set(state["fresh"]), state["due"]
        self._settling, self._last_refresh = state["settling"], state["last_refresh"]
        self._history.clear()


def underflow_of(stats: SiteStats) -> float:
    """Return the share of the non-zero elements that underflowed, from a step that measured."""
    return min(1.0, stats.underflow_ratio / stats.nonzero_ratio) if stats.nonzero_ratio > 0 else 0.0
