"""Stochastic and toward-zero rounding."""

from __future__ import annotations

import math

import pytest
import torch
from codec_oracles import FORMATS, assert_same, assert_same_codes, edges, ids, random_bits, random_in_range
from hypothesis import given, settings
from hypothesis import strategies as st

from fxprec.numerics import directed, rounding
from fxprec.numerics.formats import E4M3FN_NAN, FP16_169, HFP8_143, HFP8_152, Format
from fxprec.numerics.reference import reference_quantize
from fxprec.numerics.rounding import decode, encode, quantize
from fxprec.numerics.rows import format_row


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "COMPILE_ABOVE", 1 << 40)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def neighbours(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of ``fmt`` around float32 magnitudes within its range, from the nearest one alone."""
    nearest = reference_quantize(x.abs(), fmt)
    codes = encode(nearest, fmt).long()
    above = nearest > x.abs()
    down = decode((codes - above.long()).to(fmt.code_dtype), fmt)
    up = decode((codes + (~above).long()).clamp(max=fmt.largest_code).to(fmt.code_dtype), fmt)
    return down, up


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_zero_is_the_neighbour_below(fmt: Format) -> None:
    x = torch.cat([edges(fmt), random_in_range(fmt, 1 << 14, 1), random_bits(1 << 14, 2)])
    x = x[x.isfinite()]
    inside = x[x.abs() <= fmt.largest]
    down, _ = neighbours(inside, fmt)
    assert_same(quantize(inside, fmt, "zero"), torch.copysign(down, inside), inside)
    beyond = x[x.abs() > fmt.largest]
    assert (quantize(beyond, fmt, "zero") == torch.copysign(torch.tensor(fmt.largest), beyond)).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
@pytest.mark.parametrize("mode", ["zero", "stochastic"])
def test_specials_follow_the_nearest_rule(fmt: Format, mode: rounding.Rounding) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    assert_same(quantize(x, fmt, mode), quantize(x, fmt), x)


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_stochastic_is_one_of_the_neighbours(fmt: Format) -> None:
    x = torch.cat([edges(fmt), random_in_range(fmt, 1 << 15, 3)])
    x = x[x.abs() <= fmt.largest]
    down, up = neighbours(x, fmt)
    y = quantize(x, fmt, "stochastic", seeded())
    assert (torch.signbit(y) == torch.signbit(x)).all()
    assert ((y.abs() == down) | (y.abs() == up)).all()
    assert (y[x.abs() == down] == x[x.abs() == down]).all()  # numbers of the format stay


def test_stochastic_beyond_the_largest_is_nearest() -> None:
    for fmt in (HFP8_143, E4M3FN_NAN):
        x = torch.linspace(fmt.largest * 1.001, fmt.largest * 2, 500)
        assert_same(quantize(x, fmt, "stochastic"), quantize(x, fmt), x)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([HFP8_143, HFP8_152, FP16_169, Format(3, 0), Format(5, 10, specials="ieee")]),
    st.floats(0.01, 0.99),
    st.floats(-0.6, 0.9),
    st.integers(0, 1000),
)
def test_stochastic_is_unbiased(fmt: Format, fraction: float, height: float, seed: int) -> None:
    """The share rounded up is binomial: six deviations leave one false alarm in 10^7 examples."""
    count = 20_000
    span = fmt.max_exponent - fmt.min_exponent
    base = quantize(torch.tensor(2.0 ** (fmt.min_exponent + height * span)), fmt, "zero")
    down, up = (float(n) for n in neighbours(base * (1 + 2.0**-20), fmt))
    x = torch.full((count,), down + fraction * (up - down))
    exact = (float(x[0]) - down) / (up - down)
    share = float((quantize(x, fmt, "stochastic", seeded(seed)) == up).double().mean())
    assert abs(share - exact) < 6 * math.sqrt(exact * (1 - exact) / count) + 1e-9


@pytest.mark.parametrize("drop", [5, 31, 34])
def test_stochastic_far_below_the_smallest(drop: int) -> None:
    """Tiny values round up as rarely as they should: the random bits below 2^-31 decide (fraction counted here)."""
    x = torch.full((1 << 20,), HFP8_143.smallest_subnormal * 2.0**-drop)
    ups = int((quantize(x, HFP8_143, "stochastic", seeded(1)) != 0).sum())
    mean = 2.0 ** (20 - drop)
    assert abs(ups - mean) <= 6 * math.sqrt(mean) + (drop > 20)


def test_stochastic_is_reproducible_and_varies() -> None:
    x = random_in_range(HFP8_143, 4096, 5)
    first = quantize(x, HFP8_143, "stochastic", seeded(7))
    assert_same(quantize(x, HFP8_143, "stochastic", seeded(7)), first, x)
    assert (quantize(x, HFP8_143, "stochastic", seeded(8)) != first).any()
    codes = encode(x, HFP8_143, "stochastic", seeded(7))
    assert_same_codes(codes, encode(first, HFP8_143), x, HFP8_143)
    out = torch.empty_like(x)
    assert_same(quantize(x, HFP8_143, "stochastic", seeded(7), out=out), first, x)


def test_encode_toward_zero() -> None:
    x = torch.tensor([29.9, -29.9, 1e9, 2.0**-14])
    assert decode(encode(x, HFP8_143, "zero"), HFP8_143).tolist() == [28.0, -28.0, 30.0, 0.0]


@pytest.mark.parametrize("fmt", [HFP8_143, FP16_169, Format(3, 0)], ids=ids)
def test_stochastic_turns_at_the_exact_fraction(fmt: Format) -> None:
    """Of the 2^31 random numbers, exactly the first fraction * 2^31 round up."""
    x = torch.cat([edges(fmt).abs(), random_in_range(fmt, 4096, 9).abs()])
    x = x[x <= fmt.largest]
    down, up = neighbours(x, fmt)
    gap = torch.where(up > down, up.double() - down, 1.0)
    turn = ((x.double() - down) / gap * 2.0**31).floor().long()
    for random, rounds_up in ((turn - 1, turn > 0), (turn, torch.zeros_like(turn, dtype=torch.bool))):
        bits = random.clamp(0, 2**31 - 1).to(torch.int32)
        y = directed.dithered(x, bits, format_row(fmt))
        assert_same(y, torch.where(rounds_up, up, down), x)
