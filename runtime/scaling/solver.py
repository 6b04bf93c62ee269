"""Compute the exponents of a whole `ScaleGraph` at once, from the statistics of its casts.

Definitions: docs/algorithms.md, "Gradient scaling". All exponents are integers, so scales never drift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fxprec.numerics.formats import Format, parse
from fxprec.plan.scales import Cast, GradientGemm, Join, ScaleGraph
from fxprec.runtime.scaling.estimates import Distribution, LogNormal, Normal, floor_log2, gemm_deviation
from fxprec.runtime.scaling.histogram import Histogram
from fxprec.runtime.stats import SiteStats

# For this a, 2**a and 2**-a are normal float32 numbers. So is each quotient in the table: a cast's scale over the
# incoming scale, a sum's scale over a part's.
MAX_SCALE_EXP = 126
# Room for gradients to grow between two refreshes before they saturate, and to shrink before too many underflow.
HEADROOM_EXP = 3
FOOTROOM_EXP = 2
# Sums are carried in float32 or bfloat16. Operators between two casts may enlarge a gradient by an unknown factor, for
# which half of the exponents above 1 are left.
LARGEST_CARRIED = 2.0**64


@dataclass(frozen=True)
class CastStatistics:
    """Statistics of the casts' gradients and of their GEMMs' operands, by row, without scales."""

    stats: Mapping[int, SiteStats]
    amax: Mapping[int, float]
    """Largest magnitude since the last refresh."""
    histograms: Mapping[int, Histogram]
    """Empty unless scales are estimated by histogram."""
    fresh: frozenset[int]
    """Casts measured since the last refresh, by row."""

    def unclipped(self, hidden: Mapping[int, int]) -> CastStatistics:
        """Return the statistics without saturation; ``hidden``: binades by row, from `hidden_by_clipping`."""
        if not any(hidden.values()):
            return self
        return replace(
            self,
            stats={row: _raised(stats, hidden.get(row, 0)) for row, stats in self.stats.items()},
            amax={row: math.ldexp(amax, hidden.get(row, 0)) for row, amax in self.amax.items()},
            histograms={row: counts.raised(hidden.get(row, 0)) for row, counts in self.histograms.items()},
        )

    def distribution(self, cast: Cast) -> Distribution | None:
        """Return the model of a cast's gradient, or None where nothing was measured."""
        own = self.stats.get(cast.row)
        if own is None:
            return None
        if (counts := self.histograms.get(cast.row)) is not None:
            return counts
        fmt = parse(cast.format)
        if cast.producer == "softmax":
            return LogNormal(own.mean_ln, own.std_ln, fmt)
        deviation = None if cast.gemm is None else self._gemm_deviation(cast.gemm)
        deviation = deviation or own.rms / math.sqrt(own.nonzero_ratio)
        return Normal(deviation, fmt) if 0.0 < deviation < math.inf else None  # squares may overflow or underflow

    def _gemm_deviation(self, gemm: GradientGemm) -> float | None:
        gradient, operand = self.stats.get(gemm.gradient), self.stats.get(gemm.operand)
        if gradient is None or operand is None:
            return None
        return gemm_deviation(gemm.length, gradient.rms, operand.rms)

    def cap(self, cast: Cast) -> int | None:
        """Return the largest exponent that keeps a cast from overflowing, or None where nothing was measured.

        Either of two bounds is enough, so the larger exponent counts: the largest gradient seen, with room to grow, or
        the largest that its GEMM can make.
        """
        amax = self.amax.get(cast.row)
        if amax is None:
            return None
        fmt = parse(cast.format)
        caps = [scale_exp(amax, fmt)]
        if cast.gemm is not None:
            gradient, operand = self.amax.get(cast.gemm.gradient), self.amax.get(cast.gemm.operand)
            if gradient is not None and operand is not None:
                caps.append(_gemm_cap(cast.gemm.length, gradient, operand, fmt))
        return max((c for c in caps if c is not None), default=None)


@dataclass(frozen=True)
class Solution:
    """Exponents by variable, and the casts whose exponent was out of reach."""

    exps: list[int]
    refused: Mapping[int, int]
    """Exponent that was needed, by row, of each cast that got another one."""


def solve(
    graph: ScaleGraph,
    measured: CastStatistics,
    underflow: float,
    margins: Mapping[int, int],
    before: Sequence[int],
) -> Solution:
    """Return the exponent of each variable.

    ``underflow`` is the share of non-zero elements that may round to zero. ``margins``, by row, are added to exponents
    for which the model has underestimated underflow. The exponent of a cast without a new measurement moves by as much
    as the incoming scale has moved since ``before``.
    """
    exps: list[int] = []
    refused: dict[int, int] = {}
    for i, variable in enumerate(graph.variables):
        if isinstance(variable, Cast):
            found = _cast_exp(variable, measured, underflow, margins.get(variable.row, 0))
            source = variable.source
            moved = 0 if source is None else exps[source] - before[source]
            wanted = before[i] + moved if found is None else found
            exps.append(within_reach(variable, wanted, exps))
            if exps[i] != wanted:
                refused[variable.row] = wanted
        else:
            exps.append(within_reach(variable, _join_exp(graph, variable, exps, measured), exps))
    return Solution(exps, refused)


def first_exps(graph: ScaleGraph, amax: float) -> list[int]:
    """Return the exponent of each variable for a first backward pass, before anything is measured.

    A cast's largest gradient is assumed to be ``amax``, the largest of those that enter the graph, times the cast's
    constant factor. If that lies in the lower half of the format's binades or in the uppermost quarter, the scale moves
    it to the middle. Nobody knows yet how gradients grow or shrink on the way.
    """
    exps: list[int] = []
    for variable in graph.variables:
        if isinstance(variable, Cast):
            fmt = parse(variable.format)
            largest = floor_log2(fmt.largest)
            binades = largest - floor_log2(fmt.smallest_subnormal)
            wanted = largest - binades // 2 - floor_log2(amax) - variable.factor
            if -(binades // 4) <= wanted <= 0:
                wanted = 0
        else:
            wanted = max(0 if part is None else exps[part] for part in variable.parts)
        exps.append(within_reach(variable, wanted, exps))
    return exps


def within_reach(variable: Cast | Join, wanted: int, exps: Sequence[int]) -> int:
    """Return the exponent nearest to ``wanted`` that float32 can apply and take off; ``exps``: those chosen so far.

    One always exists, because incoming exponents lie at most twice `MAX_SCALE_EXP` apart.
    """
    incoming = (variable.source,) if isinstance(variable, Cast) else variable.parts
    near = [0, *(0 if v is None else exps[v] for v in incoming)]
    return max(max(near) - MAX_SCALE_EXP, min(min(near) + MAX_SCALE_EXP, wanted))


def hidden_by_clipping(graph: ScaleGraph, clipped: Mapping[int, int]) -> tuple[list[int], dict[int, int]]:
    """Return the binades by which gradients were larger than measured: after each variable, and into each cast by row.

    If a gradient saturates as a whole, everything computed from it is too small by the same factor. ``clipped`` has
    those binades, by row.
    """
    carried: list[int] = []
    into: dict[int, int] = {}
    for variable in graph.variables:
        parts = (variable.source,) if isinstance(variable, Cast) else variable.parts
        lost = max(0 if part is None else carried[part] for part in parts)
        if isinstance(variable, Cast):
            into[variable.row] = lost
            lost += clipped.get(variable.row, 0)
        carried.append(min(lost, 2 * MAX_SCALE_EXP))
    return carried, into


def _raised(stats: SiteStats, binades: int) -> SiteStats:
    if not binades:
        return stats
    factor = 2.0**binades
    mean_ln = stats.mean_ln + binades * math.log(2)
    return stats._replace(amax=stats.amax * factor, rms=stats.rms * factor, mean_ln=mean_ln)


def _cast_exp(cast: Cast, measured: CastStatistics, underflow: float, margin: int) -> int | None:
    if cast.row not in measured.fresh or (cap := measured.cap(cast)) is None:
        return None
    found = measured.distribution(cast)
    return cap if found is None else min(found.smallest_scale_exp(underflow) + FOOTROOM_EXP + margin, cap)


def _join_exp(graph: ScaleGraph, join: Join, exps: Sequence[int], measured: CastStatistics) -> int:
    parts = [0 if part is None else exps[part] for part in join.parts]
    casts = (None if part is None else _last_cast(graph, part) for part in join.parts)
    amaxes = (None if cast is None else measured.amax.get(cast.row) for cast in casts)
    return join_exp(parts, [a for a in amaxes if a is not None], LARGEST_CARRIED)


def _last_cast(graph: ScaleGraph, variable: int) -> Cast | None:
    found = graph.variables[variable]
    return found if isinstance(found, Cast) else None


def join_exp(exps: Sequence[int], amaxes: Sequence[float], largest: float) -> int:
    """Return the common exponent of gradients that are added up.

    It is the largest of ``exps`` at which neither a summand nor the sum reaches ``largest``; if none fits, the largest
    integer that does. ``amaxes`` are the summands' largest magnitudes, without their scales.
    """
    total = math.fsum(amaxes)
    if not total:
        return max(exps)
    limit = floor_log2(largest) - floor_log2(total) - 1
    while math.ldexp(total, limit + 1) < largest:
        limit += 1
    return max((e for e in exps if e <= limit), default=limit)


def scale_exp(amax: float, fmt: Format) -> int | None:
    """Return the exponent k that puts ``amax * 2**k`` ``HEADROOM_EXP`` below ``fmt.largest``, rounded down.

    None for an ``amax`` of zero, inf or NaN.
    """
    if not (0.0 < amax < math.inf):
        return None
    return floor_log2(fmt.largest) - 1 - HEADROOM_EXP - floor_log2(amax)


def _gemm_cap(length: int, gradient: float, operand: float, fmt: Format) -> int | None:
    """Return the largest exponent at which no sum of ``length`` products can overflow."""
    bound = length * gradient * operand
    if not 0.0 < bound < math.inf:
        return None
    k = floor_log2(fmt.largest) - floor_log2(bound)
    return k if math.ldexp(bound, k) < fmt.largest else k - 1
