"""The codec's text beside the reference: the row form of every function, its named variants, and what counts."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from codec_oracles import FORMATS, all_codes, assert_same, assert_same_codes, edges, ids, random_bits, random_in_range
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxprec.errors import FormatError
from fxprec.numerics import codec, directed, reference, special, stats
from fxprec.numerics.formats import E4M3FN, E5M2, FP16_169, HFP8_143, HFP8_152, Format, kept_codes
from fxprec.numerics.rows import INFINITY, CodeRow, FormatRow, code_row, format_row
from fxprec.runtime import reference_ops


def samples(fmt: Format, count: int = 1 << 10) -> Tensor:
    return torch.cat([edges(fmt)[-4096:], random_bits(count, 1), random_in_range(fmt, count, 2)])


def check_text(fmt: Format, x: Tensor, row: FormatRow, code: CodeRow) -> None:
    """Assert that each function of the text gives the reference's bits and counts, with these constants."""
    numbers, packed = reference.reference_quantize(x, fmt), reference.reference_encode(x, fmt)
    assert_same(codec.nearest(x, row), numbers, x)
    assert_same_codes(in_bits(codec.codes(x, row, code), fmt), packed, x, fmt)
    both = codec.stored(x, row, code)
    assert_same_codes(in_bits(both[0], fmt), packed, x, fmt)
    assert_same(both[1], numbers, x)
    every = all_codes(fmt)
    wide = every.view(torch.int32) if fmt.code_dtype == torch.uint32 else every.to(torch.int32)
    assert_same(codec.numbers(wide, row, code), reference.reference_decode(every, fmt), wide)
    known = x[~x.isnan()]
    counted, wanted = stats.count(known, known, row), reference.reference_stats(known, fmt)
    assert [float(n) for n in counted] == [wanted.overflow, wanted.underflow, wanted.amax, len(known)]


def in_bits(code: Tensor, fmt: Format) -> Tensor:
    return code.view(torch.uint32) if fmt.code_dtype == torch.uint32 else code.to(fmt.code_dtype)


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_the_row_form_is_the_reference(fmt: Format) -> None:
    check_text(fmt, samples(fmt), format_row(fmt), code_row(fmt))


@st.composite
def formats(draw: st.DrawFn) -> Format:
    fields = {
        "exponent_bits": draw(st.integers(1, 8)),
        "mantissa_bits": draw(st.integers(0, 23)),
        "bias": draw(st.integers(-20, 20)),
        "specials": draw(st.sampled_from(["none", "ieee", "fn"])),
        "overflow": draw(st.sampled_from([None, "saturate", "inf", "nan"])),
    }
    try:
        return Format(**fields)
    except FormatError:
        return Format(fields["exponent_bits"], fields["mantissa_bits"])


@settings(max_examples=60, deadline=None)
@given(formats(), st.integers(0, 1 << 30))
def test_the_row_form_is_the_reference_for_any_format(fmt: Format, seed: int) -> None:
    x = torch.cat([random_bits(256, seed), random_in_range(fmt, 256, seed + 1)])
    tensors = [torch.tensor(tuple(r), dtype=torch.int32).unbind() for r in (format_row(fmt), code_row(fmt))]
    check_text(fmt, x, FormatRow(*tensors[0]), CodeRow(*tensors[1]))
    check_text(fmt, x, format_row(fmt), code_row(fmt))


@pytest.mark.parametrize("field", [f for f in (*FormatRow._fields, *CodeRow._fields) if f != "scale_exponent"])
def test_no_constant_may_be_wrong(field: str) -> None:
    """Any of them a little larger or smaller, and some format's numbers, codes or counts are no longer right."""
    least = 2 << 23 if field == "min_normal" else 1  # in the lowest binade both ways of rounding agree
    for step in (least, -least):
        assert any(is_noticed(fmt, field, step) for fmt in (HFP8_143, E4M3FN, E5M2, FP16_169)), step


def is_noticed(fmt: Format, field: str, step: int) -> bool:
    row, code = format_row(fmt), code_row(fmt)
    if field in FormatRow._fields:
        row = row._replace(**{field: getattr(row, field) + step})
    else:
        code = code._replace(**{field: getattr(code, field) + step})
    try:
        check_text(fmt, samples(fmt), row, code)
    except (AssertionError, RuntimeError):  # the latter: a shift by 32 bits
        return True
    return False


SHORT = [f for f in FORMATS if special.shares_exponents(f)]
CUT = [f for f in FORMATS if special.carries_into_infinity(format_row(f))]


@pytest.mark.parametrize(
    ("fmt", "variant"),
    [*((f, special.nearest_short) for f in SHORT), *((f, special.nearest_cut) for f in CUT if f in SHORT)],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_a_named_variant_rounds_as_the_text(fmt: Format, variant: Callable[..., Tensor]) -> None:
    x = samples(fmt)
    assert_same(variant(x, format_row(fmt)), reference.reference_quantize(x, fmt), x)


@pytest.mark.parametrize("fmt", SHORT, ids=ids)
def test_the_named_variant_of_stochastic_rounding_draws_as_the_text(fmt: Format) -> None:
    x = samples(fmt)
    draws = torch.randint(0, 1 << 31, x.shape, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    for random in (draws, torch.zeros_like(draws), torch.full_like(draws, (1 << 31) - 1)):
        assert_same(special.dithered_short(x, random, fmt), directed.dithered(x, random, format_row(fmt)), x)


def test_variants_are_there_for_the_formats_they_are_for() -> None:
    assert {f.name for f in CUT} >= {"bf16", "fp16"} - {f.name for f in FORMATS if not special.shares_exponents(f)}
    assert "bf16" in {f.name for f in SHORT}
    assert not special.shares_exponents(HFP8_152)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.nan_code is not None and f.bits < 32], ids=ids)
def test_an_infinity_that_is_kept_has_a_code_of_its_own_and_nothing_else_changes(fmt: Format) -> None:
    x = samples(fmt)
    code = in_bits(codec.folded_codes(x, fmt, kept_codes(fmt)[0]), fmt)
    finite = x.isfinite()
    assert_same_codes(code[finite], reference.reference_encode(x[finite], fmt), x[finite], fmt)
    back = reference.reference_decode(code, fmt)
    assert bool(back[x.isnan()].isnan().all())
    kept = back[x.isinf()]
    assert bool((kept == x[x.isinf()]).all() if fmt.specials == "ieee" else kept.isnan().all())
    signed = ~x.isnan()  # a NaN's sign means nothing
    put_back = reference_ops.keep_codes(reference.reference_encode(x, fmt).to(fmt.code_dtype), x, fmt.name)
    assert torch.equal(in_bits(put_back, fmt)[signed], code[signed]), "as codes that are cast and kept in one kernel"


def test_moments_are_float64s() -> None:
    x = torch.randn(4096) * torch.exp2(torch.randint(-8, 8, (4096,)).float())
    x[::7] = 0
    exact = x[x != 0].double()
    sums = [exact.square().sum(), exact.abs().log().sum(), exact.abs().log().square().sum()]
    nonzero, *found = stats.count_moments(x)
    assert int(nonzero) == len(exact)
    np.testing.assert_allclose([float(n) for n in found], [float(n) for n in sums], rtol=1e-5)


@pytest.mark.parametrize(("carried", "stored_exp"), [(0, 0), (5, 12), (-30, -7)])
def test_statistics_are_those_of_the_tensor_without_its_scale(carried: int, stored_exp: int) -> None:
    plain = torch.randn(2048, dtype=torch.float64)
    plain[::5] = 0
    incoming, stored = (plain * 2.0**carried).float(), (plain * 2.0**stored_exp).float()
    counted = [*stats.count(incoming, stored, format_row(HFP8_143)), *stats.count_moments(stored)]
    (found,) = stats.finish(torch.tensor([[*map(float, counted), carried, stored_exp]], dtype=torch.float64))
    wanted, logs = reference.reference_stats(stored, HFP8_143), plain[plain != 0].abs().log()
    assert found[:2] == (wanted.overflow / 2048, wanted.underflow / 2048)
    exact = (
        plain.abs().max(),
        plain.square().mean().sqrt(),
        (plain != 0).double().mean(),
        logs.mean(),
        logs.std(correction=0),
    )
    np.testing.assert_allclose(found[2:], [float(v) for v in exact], rtol=1e-5)


def test_statistics_of_nothing_and_of_zeros() -> None:
    rows = [stats.Counts(0, 0, 0, 0, *stats.UNMEASURED, 3, 3), stats.Counts(0, 0, 0, 8, 0, 0, 0, 0, 3, 3)]
    nothing, zeros = stats.finish(torch.tensor(rows, dtype=torch.float64))
    assert nothing == stats.Statistics(0, 0, 0)
    assert zeros == stats.Statistics(0, 0, 0, 0, 0, 0, 0)
    (bad,) = stats.finish(torch.tensor([stats.Counts(1, 0, math.nan, 8, *stats.UNMEASURED, 0, 0)], dtype=torch.float64))
    assert math.isnan(bad.amax)


@pytest.mark.parametrize("measured", [0, 1])
def test_stripes_add_up(measured: int) -> None:
    """Two sites of 32 stripes each, beside sums of Python's whole numbers."""
    g = torch.Generator().manual_seed(0)
    table = torch.zeros(2, stats.STRIPES + 1, stats.COLUMNS, dtype=torch.int32)
    lost, amax = (
        torch.randint(0, 1 << 30, (2, stats.STRIPES, 2), generator=g),
        torch.rand(2, stats.STRIPES, generator=g),
    )
    nonzero, sums = (
        torch.randint(0, 1 << 30, (2, stats.STRIPES), generator=g),
        torch.randn(2, stats.STRIPES, 3, generator=g).double(),
    )
    table[:, :-1, :2], table[:, :-1, 2], table[:, :-1, 3] = lost.int(), amax.view(torch.int32), nonzero.int()
    table[:, :-1, 4:] = sums.view(torch.int32)
    elements, carried, scale = [(1 << 40) + 3, 7], [4, -9], [2, 11]
    table[:, -1, :2] = torch.tensor(elements).view(2, 1).view(torch.int32)
    table[:, -1, 2:5] = torch.tensor([[c, s, measured] for c, s in zip(carried, scale, strict=True)], dtype=torch.int32)
    for site, row in enumerate(stats.gathered(table.view(-1)).tolist()):
        found = stats.Counts(*row)
        assert [found.overflow, found.underflow] == [sum(lost[site, :, i].tolist()) for i in (0, 1)]
        assert (found.amax, found.elements) == (float(amax[site].max()), elements[site])
        assert (found.carried, found.moments_exp) == (carried[site], carried[site] + scale[site])
        if measured:
            assert found.nonzero == sum(nonzero[site].tolist())
            np.testing.assert_allclose(found[5:8], sums[site].sum(0).tolist(), rtol=1e-12)
        else:
            assert found[4:8] == stats.UNMEASURED
    assert int(table[:, :-1, 2].max()) < INFINITY
