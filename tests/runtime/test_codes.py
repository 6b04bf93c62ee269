"""Statistics counted from codes, beside those that rounding itself counts."""

from __future__ import annotations

import math

import pytest
import torch

from fxprec.errors import NativeArgumentError
from fxprec.numerics import codec, stats
from fxprec.numerics.formats import parse
from fxprec.numerics.rows import format_row
from fxprec.runtime.cpu.codes import count_codes

SIZES = (0, 1, 63, 64, 1000, 70_001)  # less than a row of lanes, several blocks of them


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fn_nan", "e5m2", "e5m2_sat", "1-4-3+4", "1-5-2", "1-2-1", "fp16"])
def test_codes_tell_what_overflowed_and_the_largest_magnitude(name):
    fmt = parse(name)
    sources = [torch.randn(size) * fmt.largest * 0.6 for size in SIZES]
    codes = [codec.encode_bits(x, fmt) for x in sources]
    rows = stats.finish(count_codes(codes, [fmt] * len(codes), [0] * len(codes)).view(-1, stats.WIDTH))
    for x, q, found in zip(sources, codes, rows, strict=True):
        decoded = codec.decode_bits(q, fmt).abs()
        over = x.abs() >= fmt.largest if fmt.overflow == "saturate" else ~decoded.isfinite()
        over |= decoded >= fmt.largest if fmt.overflow == "saturate" else False
        assert found.overflow_ratio == float(over.sum()) / max(x.numel(), 1)
        assert_same(found.amax, float(torch.amax(decoded)) if x.numel() else 0.0)
        assert math.isnan(found.underflow_ratio), "codes do not tell"
        assert found.nonzero_ratio == -1, "no moments"
        if x.numel() == SIZES[-1]:
            over, *_ = stats.count(x, x, format_row(fmt))
            assert found.overflow_ratio >= int(over) / x.numel(), "never fewer than rounding counts"


@pytest.mark.parametrize(("name", "amax"), [("e4m3fn", math.nan), ("e5m2", math.inf), ("1-4-3+4", 30.0)])
def test_inf_and_nan_show_where_the_format_has_them(name, amax):
    fmt = parse(name)
    x = torch.tensor([1.0, -math.nan if name == "e4m3fn" else -math.inf, 2.0])
    (found,) = stats.finish(count_codes([codec.encode_bits(x, fmt)], [fmt], [0]).view(-1, stats.WIDTH))
    assert found.overflow_ratio == pytest.approx(1 / 3)
    assert_same(found.amax, amax)


def test_codes_in_memory_with_gaps_are_refused():
    with pytest.raises(NativeArgumentError, match=r"codes is 50 elements of uint8 on cpu with strides \(2,\)"):
        count_codes([torch.zeros(100, dtype=torch.uint8)[::2]], [parse("1-4-3+4")], [0])


def assert_same(found: float, wanted: float) -> None:
    assert found == wanted or (math.isnan(found) and math.isnan(wanted))


def test_the_scale_that_codes_are_stored_with_comes_off_the_largest_magnitude():
    fmt = parse("e4m3fn")
    codes = codec.encode_bits(torch.tensor([0.0, -3.5]), fmt)
    rows = stats.finish(count_codes([codes, codes], [fmt, fmt], [0, 12]).view(-1, stats.WIDTH))
    assert [row.amax for row in rows] == [3.5, 3.5 * 2.0**-12]
