"""Exponents for a whole `ScaleGraph` at once, from the statistics of its casts (ALGORITHMS 4).

Integers throughout: an exponent is a whole number of binades, so scales never drift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxprec.formats import Format, parse
from fxprec.runtime.estimates import Distribution, LogNormal, Normal, floor_log2, gemm_deviation
from fxprec.runtime.histogram import Histogram
from fxprec.runtime.stats import SiteStats
from fxprec.scales import Cast, Gemm, Join, ScaleGraph

# a, and the quotient of any two, stay normal float32 numbers.
MAX_SCALE_EXP = 60
# Room for gradients to grow between two refreshes before they saturate, and to shrink before too many underflow.
HEADROOM_EXP = 3
FOOTROOM_EXP = 2
# Sums are carried in float32 or bfloat16. What operators between two casts may add to a gradient's magnitude is not
# known; half of the exponents above 1 are left for it.
LARGEST_CARRIED = 2.0**64


@dataclass(frozen=True)
class Measured:
    """What is known of the casts' gradients and their GEMMs' operands, by row; nothing in it carries a scale."""

    stats: Mapping[int, SiteStats]
    amax: Mapping[int, float]
    """Largest magnitude since the last refresh."""
    histograms: Mapping[int, Histogram]
    """Empty unless the estimate is by histogram."""

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
        return Normal(deviation or own.rms / math.sqrt(own.nonzero_ratio), fmt)

    def _gemm_deviation(self, gemm: Gemm) -> float | None:
        gradient, operand = self.stats.get(gemm.gradient), self.stats.get(gemm.operand)
        if gradient is None or operand is None:
            return None
        return gemm_deviation(gemm.length, gradient.rms, operand.rms)

    def cap(self, cast: Cast) -> int | None:
        """Return the largest exponent that keeps a cast from overflowing, or None where nothing was measured.

        Either bound is enough: the largest gradient seen, with room to grow, or the largest its GEMM can make.
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


def solve(graph: ScaleGraph, measured: Measured, underflow: float, margins: Mapping[int, int]) -> list[int]:
    """Return the exponent of each variable.

    ``underflow`` is the share of non-zero elements that may round to zero; ``margins`` (by row) raises an exponent
    where the model has been too kind. A cast of which nothing was measured inherits the exponent that comes in.
    """
    exps: list[int] = []
    for variable in graph.variables:
        if isinstance(variable, Cast):
            wanted = _cast_exp(variable, measured, underflow, margins.get(variable.row, 0))
            inherited = 0 if variable.source is None else exps[variable.source]
            exps.append(inherited if wanted is None else clamped(wanted))
        else:
            exps.append(_solve_join(graph, variable, exps, measured))
    return exps


def _cast_exp(cast: Cast, measured: Measured, underflow: float, margin: int) -> int | None:
    found, cap = measured.distribution(cast), measured.cap(cast)
    if found is None or cap is None:
        return None
    return min(found.smallest_scale_exp(underflow) + FOOTROOM_EXP + margin, cap)


def _solve_join(graph: ScaleGraph, join: Join, exps: Sequence[int], measured: Measured) -> int:
    parts = [0 if part is None else exps[part] for part in join.parts]
    casts = (None if part is None else _last_cast(graph, part) for part in join.parts)
    amaxes = (None if cast is None else measured.amax.get(cast.row) for cast in casts)
    return clamped(join_exp(parts, [a for a in amaxes if a is not None], LARGEST_CARRIED))


def _last_cast(graph: ScaleGraph, variable: int) -> Cast | None:
    found = graph.variables[variable]
    return found if isinstance(found, Cast) else None


def join_exp(exps: Sequence[int], amaxes: Sequence[float], largest: float) -> int:
    """Return the common exponent of gradients that are added up.

    The largest of ``exps`` at which neither a summand nor the sum reaches ``largest``; if none fits, the largest
    power of two that does. ``amaxes`` are the summands' largest magnitudes, without their scales.
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

    None when ``amax`` says nothing: zero, infinite or NaN.
    """
    if not (0.0 < amax < math.inf):
        return None
    return clamped(floor_log2(fmt.largest) - 1 - HEADROOM_EXP - floor_log2(amax))


def _gemm_cap(length: int, gradient: float, operand: float, fmt: Format) -> int | None:
    """Return the largest exponent at which no sum of ``length`` products can overflow."""
    bound = length * gradient * operand
    if not 0.0 < bound < math.inf:
        return None
    k = floor_log2(fmt.largest) - floor_log2(bound)
    return clamped(k if math.ldexp(bound, k) < fmt.largest else k - 1)


def clamped(exponent: int) -> int:
    return max(-MAX_SCALE_EXP, min(MAX_SCALE_EXP, exponent))
