"""Scale exponents against closed forms, written with exact integers and fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from fxprec.formats import E5M2, FP16, HFP8_143, HFP8_152
from fxprec.runtime.solver import HEADROOM_EXP, MAX_SCALE_EXP, scale_exp

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


def test_the_exponent_keeps_factor_and_inverse_normal_in_float32() -> None:
    assert scale_exp(1e-45, HFP8_152) == MAX_SCALE_EXP
    assert scale_exp(3e38, HFP8_143) == -MAX_SCALE_EXP
    for k in (2 * MAX_SCALE_EXP, -2 * MAX_SCALE_EXP):  # of two scales, one after the other
        assert 2.0**-126 <= 2.0**k < 2.0**128
