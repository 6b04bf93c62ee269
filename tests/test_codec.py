"""Nearest rounding, encoding and decoding: bit for bit against other implementations and the float64 reference."""

from __future__ import annotations

import gfloat
import numpy as np
import pytest
import torch
from codec_oracles import (
    FORMATS,
    ML_DTYPES,
    all_codes,
    assert_same,
    assert_same_codes,
    edges,
    gfloat_info,
    ids,
    random_bits,
    random_in_range,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fxprec.errors import FormatError
from fxprec.numerics import codec, reference, rounding, stats
from fxprec.numerics.formats import E4M3FN, E5M2, FP32, HFP8_143, Format, parse
from fxprec.numerics.rounding import decode, encode, quantize
from fxprec.numerics.rows import FormatRow, format_row

NUM_RANDOM = 1 << 20  # bit patterns per shared format: more than 10 million in all, with gfloat's


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "COMPILE_ABOVE", 1 << 40)


def samples(fmt: Format, count: int = 1 << 14) -> torch.Tensor:
    return torch.cat([edges(fmt), random_bits(count, 1), random_in_range(fmt, count, 2)])


@pytest.mark.parametrize("fmt", list(ML_DTYPES), ids=ids)
def test_decode_is_ml_dtypes(fmt: Format) -> None:
    codes = all_codes(fmt)
    foreign = codes.numpy().view(ML_DTYPES[fmt]).astype(np.float32)
    assert_same(decode(codes, fmt), torch.from_numpy(foreign), codes)


@pytest.mark.parametrize("fmt", list(ML_DTYPES), ids=ids)
def test_round_is_ml_dtypes(fmt: Format) -> None:
    x = torch.cat([edges(fmt), random_bits(NUM_RANDOM // 2, 3), random_in_range(fmt, NUM_RANDOM // 2, 4)])
    if fmt.nan_code is None:
        x = x[~x.isnan()]  # ml_dtypes turns NaN into -0.0 there
    with np.errstate(all="ignore"):
        foreign = x.numpy().astype(ML_DTYPES[fmt])
    assert_same(quantize(x, fmt), torch.from_numpy(foreign.astype(np.float32)), x)
    assert_same_codes(encode(x, fmt), torch.from_numpy(foreign.view(f"u{fmt.code_dtype.itemsize}")), x, fmt)


GFLOAT = [f for f in FORMATS if f.bits <= 16 and f.overflow != "nan" and f.max_exponent < 127]


@pytest.mark.parametrize("fmt", GFLOAT, ids=ids)
def test_decode_is_gfloat(fmt: Format) -> None:
    codes = all_codes(fmt)
    foreign = gfloat.decode_ndarray(gfloat_info(fmt), codes.numpy().astype(np.int64)).astype(np.float32)
    assert_same(decode(codes, fmt), torch.from_numpy(foreign), codes)


@pytest.mark.parametrize("fmt", GFLOAT, ids=ids)
def test_round_is_gfloat(fmt: Format) -> None:
    x = torch.cat([edges(fmt), random_bits(1 << 17, 5), random_in_range(fmt, 1 << 17, 6)])
    x = x[~x.isnan()]
    info = gfloat_info(fmt)
    with np.errstate(all="ignore"):
        foreign = gfloat.round_ndarray(info, x.double().numpy(), sat=fmt.overflow == "saturate")
        codes = gfloat.encode_ndarray(info, foreign)
    assert_same(quantize(x, fmt), torch.from_numpy(foreign).float(), x)
    assert_same_codes(encode(x, fmt), torch.from_numpy(codes.astype(np.int64)), x, fmt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str)
def test_round_is_torch_cast(dtype: torch.dtype) -> None:
    x = random_bits(1 << 18, 7)
    assert_same(quantize(x, str(dtype).removeprefix("torch.")), x.to(dtype).float(), x)


def test_e4m3fn_is_clamp_then_torch_cast() -> None:
    x = torch.cat([edges(E4M3FN), random_bits(1 << 18, 8)])
    assert_same(quantize(x, "e4m3fn"), x.clamp(-448, 448).to(torch.float8_e4m3fn).float(), x)


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_every_path_is_the_reference(fmt: Format) -> None:
    x = samples(fmt)
    wanted, codes = reference.reference_quantize(x, fmt), reference.reference_encode(x, fmt)
    assert_same(quantize(x, fmt), wanted, x)
    assert_same(codec.nearest(x, format_row(fmt)), wanted, x)
    assert_same_codes(encode(x, fmt), codes, x, fmt)
    assert_same_codes(codec.encode_bits(x, fmt), codes, x, fmt)
    every = all_codes(fmt)
    assert_same(decode(every, fmt), reference.reference_decode(every, fmt), every)
    assert_same(codec.decode_bits(every, fmt), reference.reference_decode(every, fmt), every)


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_a_row_may_hold_tensors(fmt: Format) -> None:
    x = samples(fmt, 256)
    table = torch.tensor([[0] * len(FormatRow._fields), format_row(fmt)], dtype=torch.int32)
    assert_same(codec.nearest(x, FormatRow(*table[1].unbind())), reference.reference_quantize(x, fmt), x)


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_statistics_are_the_reference(fmt: Format) -> None:
    x = samples(fmt)
    for values in (x, x[~x.isnan()]):
        over, under, amax, elements = stats.count(values, values, format_row(fmt))
        want = reference.reference_stats(values, fmt)
        assert (int(over), int(under), int(elements)) == (want.overflow, want.underflow, values.numel())
        np.testing.assert_equal(float(amax), want.amax)


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_the_references_statistics_are_what_its_rounding_does(fmt: Format) -> None:
    x = samples(fmt)
    rounded = reference.reference_round(x, reference.Grid.of(fmt))
    assert reference.reference_stats(x, fmt).underflow == int(((rounded == 0) & (x != 0)).sum())


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.bits <= 12], ids=ids)
def test_the_reference_decodes_many_codes_as_few(fmt: Format) -> None:
    codes = torch.arange(1 << fmt.bits).to(torch.int32).to(fmt.code_dtype)
    few, many = (reference.reference_decode(c, fmt, torch.float64) for c in (codes, codes.repeat(5, 2).t()))
    assert torch.equal(many.view(torch.int64), few.repeat(5, 2).t().view(torch.int64))


def test_statistics_by_hand() -> None:
    x = torch.tensor([30.0, 30.99, 31.0, -400.0, torch.inf, torch.nan, 0.0, -0.0, 2.0**-14, -(2.0**-15), 2.0**-13])
    over, under, *_ = stats.count(x, x, format_row(HFP8_143))
    assert int(over) == 4  # 31 = largest + half a unit is the first
    assert int(under) == 2  # 2^-14 ties to zero
    x = torch.tensor([463.0, 464.0])
    assert int(stats.count(x, x, format_row(E4M3FN))[0]) == 1


def test_tie_that_rounds_twice_in_scaled_encoders() -> None:
    x = torch.tensor([0x38800000, 0x38800001, 0x3887FFFF], dtype=torch.int32).view(torch.float32)
    assert quantize(x, "1-4-3+4").tolist() == [0.0, 2.0**-13, 2.0**-13]
    assert codec.encode_bits(x, HFP8_143).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("fmt", "x", "wanted"),
    [
        ("1-4-3+4", [31.0, -1e30, torch.inf, -torch.inf], [30.0, -30.0, 30.0, -30.0]),
        ("e4m3fn", [464.0, 464.1, -torch.inf], [448.0, 448.0, -448.0]),
        ("e4m3fn_nan", [464.0, 464.1, torch.inf], [448.0, torch.nan, torch.nan]),
        ("e5m2", [61439.0, 61440.0, -torch.inf], [57344.0, torch.inf, -torch.inf]),
        ("e5m2_sat", [61440.0, torch.inf, torch.nan], [57344.0, 57344.0, torch.nan]),
        ("1-8-7", [3.4e38, torch.inf], [2.0**127 * (2 - 2**-7)] * 2),
        ("1-3-0", [1.4, 1.5, 3.0, 0.125, 0.126], [1.0, 2.0, 2.0, 0.0, 0.25]),  # ties to the even code
    ],
)
def test_overflow_and_ties_by_hand(fmt: str, x: list[float], wanted: list[float]) -> None:
    np.testing.assert_array_equal(quantize(torch.tensor(x), fmt).numpy(), np.float32(wanted))


def test_nan_stays_in_carriers_and_saturates_in_codes() -> None:
    nan = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    for fmt in FORMATS:
        assert quantize(nan, fmt).isnan().all()
        back = decode(encode(nan, fmt), fmt)
        if fmt.nan_code is None:
            assert (back == fmt.largest).all(), fmt
        else:
            assert back.isnan().all(), fmt


def test_fp32_is_the_identity() -> None:
    x = torch.cat([edges(FP32), random_bits(1 << 20, 9)])
    assert_same(quantize(x, "fp32"), x, x)


EXPONENTS, MANTISSAS = st.integers(1, 8), st.integers(0, 23)


@st.composite
def any_format(draw: st.DrawFn) -> Format:
    """Formats of every family whose range float32 can carry."""
    specials, overflow = draw(
        st.sampled_from([("none", None), ("ieee", "inf"), ("ieee", "saturate"), ("fn", "nan"), ("fn", "saturate")])
    )
    for _ in range(20):
        try:
            bias = draw(st.integers(-40, 40))
            return Format(draw(EXPONENTS), draw(MANTISSAS), bias, specials, overflow)
        except FormatError:
            continue
    return HFP8_143


@settings(max_examples=120, deadline=None, derandomize=True)
@given(any_format(), st.integers(0, 2**31))
def test_laws_of_rounding(fmt: Format, seed: int) -> None:
    x = torch.cat([random_in_range(fmt, 600, seed), random_bits(200, seed)])
    x = x[~x.isnan()].sort().values
    y = quantize(x, fmt)
    assert_same(y, reference.reference_quantize(x, fmt), x)
    assert_same(quantize(y, fmt), y, x)  # idempotent
    assert_same(quantize(-x, fmt), -y, x)  # sign-symmetric
    known = y[~y.isnan()]
    assert (known[1:] >= known[:-1]).all()  # monotone
    assert_same(decode(encode(x, fmt), fmt), y, x)
    assert_same(codec.decode_bits(codec.encode_bits(x, fmt), fmt), y, x)
    inside = x.abs() <= fmt.largest
    unit = torch.exp2(torch.frexp(x[inside].double())[1].clamp(min=fmt.min_exponent + 1) - 1.0 - fmt.mantissa_bits)
    assert ((y[inside].double() - x[inside].double()).abs() <= unit / 2).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(any_format())
def test_every_code_is_its_own_rounding(fmt: Format) -> None:
    codes = all_codes(fmt)
    numbers = decode(codes, fmt)
    number = numbers.isfinite() & (numbers.abs() <= fmt.largest)
    assert_same_codes(encode(numbers[number], fmt), codes[number], numbers[number], fmt)
    assert_same(quantize(numbers[number], fmt), numbers[number], numbers[number])
    expected = 2 * (fmt.largest_code + 1)
    assert fmt.bits > 16 or int(number.sum()) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_inputs_keep_their_dtype(dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    for fmt in ("e5m2", "e4m3fn", "1-4-3+4", "fp32"):
        wanted = reference.reference_quantize(x.float(), parse(fmt)).to(dtype)
        assert_same(quantize(x, fmt), wanted, x)


def test_shapes_layouts_and_out() -> None:
    x = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    wanted = reference.reference_quantize(x, HFP8_143)
    assert_same(quantize(x, HFP8_143), wanted, x)
    assert_same(quantize(x.transpose(0, 3), HFP8_143), wanted.transpose(0, 3), x.transpose(0, 3))
    out = torch.empty_like(x)
    assert quantize(x, HFP8_143, out=out) is out
    assert_same(out, wanted, x)
    assert_same(quantize(x, HFP8_143, out=x), wanted, out)
    assert quantize(torch.tensor(1.01), E5M2).shape == ()
    assert encode(torch.empty(0, 3), E5M2).shape == (0, 3)
    assert decode(torch.empty(0, dtype=torch.uint8), E5M2, torch.float64).dtype == torch.float64


def test_gradient_is_straight_through() -> None:
    x = torch.tensor([1.03, 500.0, 1e-9], requires_grad=True)
    quantize(x, "1-4-3+4").backward(torch.tensor([2.0, 3.0, 4.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x: quantize(x.double(), "e5m2"),
            "float64 would be rounded twice, through float32; convert with .float()",
        ),
        (lambda x: encode(x.long(), "e5m2"), "torch.int64 holds no numbers to round; give float32,"),
        (lambda x: quantize([1.0], "e5m2"), "cannot round a list; give a torch.Tensor"),
        (lambda x: encode("1.0", "e5m2"), "cannot round a str; give a torch.Tensor"),
        (lambda x: quantize(x, "e5m3"), "did you mean 'e5m2'"),
        (lambda x: quantize(x, "e5m2", "up"), "rounding='up' is unknown; use one of ['nearest',"),
        (
            lambda x: quantize(x.bfloat16(), "fp16"),
            "torch.bfloat16 cannot hold every number of fp16; quantize x.float() instead",
        ),
        (
            lambda x: quantize(x, "e5m2", out=x[1:]),
            "out is (3,) torch.float32 on cpu, the input (4,) torch.float32 on cpu; make out with torch.empty_like(x)",
        ),
        (lambda x: quantize(x, "e5m2", out=x.half()), "make out with torch.empty_like"),
        (
            lambda x: decode(x, "e5m2"),
            "codes of e5m2 are torch.uint8, not torch.float32; view or convert them to torch.u",
        ),
        (lambda x: decode(encode(x, "1-6-9"), "1-6-9", torch.float16), "float16 cannot hold every number of 1-6-9"),
        (lambda x: decode(encode(x, "e5m2"), "e5m2", torch.int32), "int32 holds no numbers"),
    ],
)
def test_bad_input(call: object, words: str) -> None:
    with pytest.raises(FormatError) as caught:
        call(torch.ones(4))  # type: ignore[operator]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value), "an error is one line"


@pytest.mark.parametrize("length", [4, 4000])
def test_decoded_values_lie_in_memory_as_their_codes(length: int) -> None:
    codes = torch.randint(0, 256, (3, length), dtype=torch.uint8).t()
    assert reference.reference_decode(codes, "e4m3fn").stride() == codes.stride()
