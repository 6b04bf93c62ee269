"""Scales of stored copies: from magnitudes to exponents."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxprec.numerics.formats import parse
from fxprec.plan.scales import Copy, ScaleGraph
from fxprec.runtime.scaling.copies import LOOK_AGAIN, MAX_COPY_EXP, CopyScales
from fxprec.runtime.stats import SiteStats

FORMATS = ("e4m3fn", "e5m2", "1-4-3+4", "1-3-2", "1-2-3")


class Loop:
    """A tensor of one magnitude a step, stored, counted and scaled as on a CPU: a step late, from what was stored."""

    def __init__(self, fmt: str) -> None:
        self.format = parse(fmt)
        self.scales, self.step = CopyScales(ScaleGraph(copies=(Copy(0, fmt),))), 0

    @property
    def exp(self) -> int:
        return self.scales.of(0)

    def store(self, amax: float) -> float:
        """Store a tensor of that largest magnitude; return its largest stored number, scale and all."""
        fmt, self.step = self.format, self.step + 1
        scaled = math.ldexp(amax, self.exp)
        stored = 0.0 if scaled <= fmt.smallest_subnormal / 2 else min(max(scaled, fmt.smallest_subnormal), fmt.largest)
        over = 1.0 if scaled >= fmt.largest else 0.0
        self.scales.note([SiteStats(0, over, math.nan, math.ldexp(stored, -self.exp))], self.step, now=self.step + 1)
        return stored


@given(st.sampled_from(FORMATS), st.floats(2.0**-70, 2.0**9))
def test_a_steady_tensor_gets_one_scale_at_which_it_is_normal_and_has_room(fmt: str, amax: float) -> None:
    loop = Loop(fmt)
    amax = min(amax, loop.format.largest / 2)
    for _ in range(40):
        loop.store(amax)
    exp, stored = loop.exp, loop.store(amax)
    assert loop.exp == exp, "settled"
    assert stored < loop.format.largest
    if math.ldexp(amax, MAX_COPY_EXP) > loop.format.largest:  # else even the largest scale leaves it small
        assert stored >= min(32 * loop.format.smallest_normal, loop.format.largest / 64)


@given(st.sampled_from(FORMATS), st.lists(st.floats(-2.0, 2.0), max_size=30), st.floats(-40, 0))
def test_what_grows_by_less_than_four_a_step_never_saturates(fmt: str, moves: list[float], start: float) -> None:
    loop, log = Loop(fmt), start
    for _ in range(40):
        loop.store(2.0**log)
    for move in moves:
        log = min(log + move, math.log2(loop.format.largest) - 1)
        assert loop.store(2.0**log) < loop.format.largest


@pytest.mark.parametrize(("amax", "exp"), [(0.5, 6), (4.0, 3), (40.0, 0), (100.0, 0), (447.0, 0)])
def test_a_copy_is_scaled_up_to_an_eighth_of_the_largest_number(amax: float, exp: int) -> None:
    loop = Loop("e4m3fn")
    for _ in range(4):
        loop.store(amax)
    assert loop.exp == exp


def test_a_scale_changes_where_it_is_off_by_more_than_two_binades() -> None:
    loop, exps = Loop("e4m3fn"), []
    for amax in (4.0, 16.0, *[2.0] * 20, *[0.7] * 10, 4.0):
        loop.store(amax)
        exps.append(loop.exp)
    assert exps == [3, *[1] * 8, *[4] * 23, 3]


@pytest.mark.parametrize(("fmt", "down"), [("e4m3fn", -3), ("e5m2", -3), ("1-4-3+4", -3), ("1-3-2", 0), ("1-2-3", 0)])
def test_a_copy_with_outliers_is_scaled_down_for_good_where_its_format_has_the_range(fmt: str, down: int) -> None:
    loop = Loop(fmt)
    largest = loop.format.largest
    exps = []
    for amax in (largest / 2, 3 * largest, 3 * largest, *[largest / 2] * 20):
        loop.store(amax)
        exps.append(loop.exp)
    assert exps == [0, *[down] * 22]


def test_a_copy_scaled_down_is_scaled_up_where_it_turns_small_and_then_down_again() -> None:
    loop = Loop("e4m3fn")
    exps = []
    for amax in (500.0, *[1e-4] * 12, 2.0, 2.0, 500.0):
        loop.store(amax)
        exps.append(loop.exp)
    assert exps[0] == -3
    assert exps[9:12] == [19] * 3
    assert exps[-1] == -3


def test_a_tensor_that_grows_again_is_scaled_less() -> None:
    loop = Loop("e4m3fn")
    for amax in (1e-4, 1e-4, 1e-4):
        loop.store(amax)
    assert loop.exp == 19
    exps = []
    for _ in range(12):
        loop.store(2.0)
        exps.append(loop.exp)
    assert exps == [11, *[3] * 11], "lowered by 8 where its true size is not known"


def test_zeros_are_searched_for_a_while_and_then_left_at_no_scale() -> None:
    loop = Loop("e4m3fn")
    exps = []
    for _ in range(LOOK_AGAIN + 10):
        loop.store(0.0)
        exps.append(loop.exp)
    assert exps[:6] == [14, 28, 42, 56, 60, 0]
    assert set(exps[6:LOOK_AGAIN]) == {0}
    assert max(exps[LOOK_AGAIN:]) > 0, "and again after a while"


def test_zeros_that_were_counted_as_zeros_stay_unscaled() -> None:
    scales = CopyScales(ScaleGraph(copies=(Copy(0, "e4m3fn"),)))
    assert not scales.note([SiteStats(0, 0.0, 0.0, 0.0)], 1, now=2), "nothing underflowed"


@pytest.mark.parametrize("amax", [math.inf, math.nan])
def test_a_bad_batch_changes_nothing(amax: float) -> None:
    scales = CopyScales(ScaleGraph(copies=(Copy(0, "e4m3fn"),)))
    assert not scales.note([SiteStats(0, 0.5, math.nan, amax)], 1, now=2)


def test_statistics_of_steps_before_a_change_choose_nothing() -> None:
    """A GPU's come two steps late."""
    scales = CopyScales(ScaleGraph(copies=(Copy(0, "e4m3fn"),)))
    assert scales.note([SiteStats(0, 0.0, 0.0, 2.0**-5)], 1, now=3) == [(0, 0, 10)]
    assert not scales.note([SiteStats(0, 0.0, 0.0, 2.0**-40)], 2, now=4)
    assert [scales.at(0, step) for step in (2, 3)] == [0, 10]
    assert not scales.note([SiteStats(0, 0.0, 0.0, 2.0**-40)], 3, now=5), "recent magnitudes count"


def test_state_is_plain_data_and_comes_back() -> None:
    loop = Loop("e4m3fn")
    for amax in (0.0, 1e-9, 1e-9):
        loop.store(amax)
    other = CopyScales(ScaleGraph(copies=(Copy(0, "e4m3fn"),)))
    other.load_state_dict(loop.scales.state_dict())
    assert (other.exps, other.state_dict()) == (loop.scales.exps, loop.scales.state_dict())
    other.load_state_dict({})
    assert other.exps == (0,)
