"""Scale exponents against closed forms, written with exact integers and fractions."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from fxprec.numerics.formats import E5M2, FP16, HFP8_143, HFP8_152
from fxprec.plan.scales import Cast, Join, ScaleGraph
from fxprec.runtime.scaling.solver import (
    HEADROOM_EXP,
    MAX_SCALE_EXP,
    CastStatistics,
    Solution,
    hidden_by_clipping,
    scale_exp,
    solve,
)
from fxprec.runtime.stats import SiteStats

FORMATS = [HFP8_152, HFP8_143, E5M2, FP16]
AMAXES = [1.0, 1.0 + 2**-23, 2 - 2**-23, 3e-7, 5.5e4, 2.0**-20, 0.1]


def floor_log2(value: Fraction) -> int:
    k = value.numerator.bit_length() - value.denominator.bit_length()
    return k if Fraction(2) ** k <= value else k - 1


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("amax", AMAXES)
def test_the_scaled_maximum_lies_below_the_headroom(fmt, amax: float) -> None:
    k = scale_exp(amax, fmt)
    assert k is not None
    scaled = Fraction(amax) * Fraction(2) ** k
    top = Fraction(2) ** floor_log2(Fraction(fmt.largest)) / 2**HEADROOM_EXP
    assert top / 2 <= scaled < top, "the largest power of two that leaves room for growth"
    assert scaled * 2**HEADROOM_EXP < Fraction(fmt.largest)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("amax", AMAXES)
def test_scaling_by_a_power_of_two_moves_the_exponent_by_as_much(fmt, amax: float) -> None:
    k = scale_exp(amax, fmt)
    assert k is not None
    for shift in (-7, 1, 12):
        assert scale_exp(math.ldexp(amax, shift), fmt) == k - shift


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan, -1.0])
def test_a_maximum_that_says_nothing_gives_no_scale(amax: float) -> None:
    assert scale_exp(amax, HFP8_152) is None


def solved(graph: ScaleGraph, before: list[int] | None = None, **amaxes: float) -> Solution:
    """Solve for casts ``r0``, ``r1``, ... of one-valued gradients."""
    by_row = {int(row[1:]): SiteStats(int(row[1:]), 0.0, 0.0, amax, amax, 1.0) for row, amax in amaxes.items()}
    measured = CastStatistics(by_row, {row: stats.amax for row, stats in by_row.items()}, {}, frozenset(by_row))
    return solve(graph, measured, 1e-3, {}, before or [0] * len(graph.variables))


def test_factors_inverses_and_quotients_are_normal_in_float32() -> None:
    def is_applicable(exponent: int) -> bool:
        return 2.0**-126 <= 2.0**exponent < 2.0**128 and 2.0**-126 <= 2.0**-exponent < 2.0**128

    pick = random.Random(0)
    for _ in range(200):
        variables: list[Cast | Join] = []
        for i in range(12):
            parts = tuple({pick.choice([None, *range(i)]) for _ in range(3)})
            joined = Join(parts) if len(parts) > 1 else Cast(i, i, "1-5-2", parts[0])
            variables.append(joined)
        graph = ScaleGraph(tuple(variables))
        exps = solved(graph, **{f"r{row}": 2.0 ** pick.randint(-126, 127) for row in graph.casts}).exps
        for exp, variable in zip(exps, variables, strict=True):
            incoming = (variable.source,) if isinstance(variable, Cast) else variable.parts
            assert is_applicable(exp)
            assert all(is_applicable(exp - (0 if v is None else exps[v])) for v in incoming)


def test_a_scale_out_of_reach_is_told() -> None:
    graph = ScaleGraph((Cast(0, 0, "1-5-2", None), Cast(1, 1, "1-5-2", 0)))
    assert solved(graph, r0=1e-45, r1=2.0**-60).refused.keys() == {0}
    found = solved(graph, r0=2.0**-90, r1=2.0**90)
    assert found.exps[0] - found.exps[1] == MAX_SCALE_EXP
    assert found.refused.keys() == {1}, "what comes in is too far away"
    assert not solved(graph, r0=2.0**-100, r1=2.0**-100).refused


def test_what_was_not_measured_moves_with_what_comes_in() -> None:
    graph = ScaleGraph((Cast(0, 0, "1-5-2", None), Cast(1, 1, "1-5-2", 0), Cast(2, 2, "1-5-2", 1)))
    before = solved(graph, r0=1.0, r1=2.0**-9, r2=8.0).exps
    after = solved(graph, before, r0=2.0**-70).exps
    assert [b - a for a, b in zip(before, after, strict=True)] == [70, 70, 70]


def test_what_a_saturated_gradient_hides_is_added_to_what_is_computed_from_it() -> None:
    graph = ScaleGraph((Cast(0, 0, "1-5-2", None), Cast(1, 1, "1-5-2", 0), Join((0, 1)), Cast(2, 2, "1-5-2", 2)))
    assert hidden_by_clipping(graph, {0: 20, 1: 3}) == ([20, 23, 23, 23], {0: 0, 1: 20, 2: 23})
    stats = SiteStats(1, 0.0, 0.0, 4.0, 1.0, 1.0, 0.5, 1.0)
    raised = CastStatistics({1: stats}, {1: 8.0}, {}, frozenset({1})).unclipped({1: 20})
    assert raised.amax == {1: 8.0 * 2**20}
    assert raised.stats[1].rms == 2.0**20
