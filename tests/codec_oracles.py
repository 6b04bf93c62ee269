"""Bit patterns, comparisons and other people's implementations that the format tests are held against."""

from __future__ import annotations

import gfloat
import ml_dtypes
import numpy as np
import torch

from fxprec.numerics import formats
from fxprec.numerics.formats import APS_121, APS_130, BF16, E4M3FN_NAN, E5M2, FP16, FP16_169, HFP8_143, HFP8_152, Format

NAMED = [*formats.NAMED.values(), HFP8_143, HFP8_152, FP16_169, APS_130, APS_121]
ODD = [
    Format(8, 7),  # codes beyond float32
    Format(8, 23),
    Format(8, 0),
    Format(8, 5, specials="ieee"),
    Format(1, 0),
    Format(1, 3),
    Format(2, 0, bias=1),  # no mantissa, odd and even exponent differences
    Format(2, 0),
    Format(3, 0, specials="fn"),
    Format(5, 23),
    Format(5, 22, bias=3),
    Format(6, 15, specials="ieee", overflow="saturate"),
    Format(4, 5, bias=-114),  # smallest normal number far above 1
    Format(5, 2, bias=112),  # subnormals are float32's own
]
FORMATS = NAMED + ODD

ML_DTYPES: dict[Format, type] = {
    BF16: ml_dtypes.bfloat16,
    FP16: np.float16,
    E5M2: ml_dtypes.float8_e5m2,
    E4M3FN_NAN: ml_dtypes.float8_e4m3fn,
    Format(4, 3, specials="ieee"): ml_dtypes.float8_e4m3,
    Format(3, 4, specials="ieee"): ml_dtypes.float8_e3m4,
    Format(2, 3): ml_dtypes.float6_e2m3fn,
    Format(3, 2): ml_dtypes.float6_e3m2fn,
    Format(2, 1): ml_dtypes.float4_e2m1fn,
}


def gfloat_info(fmt: Format) -> gfloat.FormatInfo:
    """The same format in gfloat's terms."""
    high_nans = {"none": 0, "fn": 1, "ieee": (1 << fmt.mantissa_bits) - 1}[fmt.specials]
    return gfloat.FormatInfo(
        fmt.name,
        fmt.bits,
        fmt.mantissa_bits + 1,
        bias=fmt.offset,
        is_signed=True,
        domain=gfloat.Domain.Extended if fmt.specials == "ieee" else gfloat.Domain.Finite,
        has_nz=True,
        num_high_nans=high_nans,
        has_subnormals=True,
        is_twos_complement=False,
    )


def ids(fmt: Format) -> str:
    return fmt.name


def all_codes(fmt: Format, seed: int = 0) -> torch.Tensor:
    """Every code of a format of at most 16 bits; 65536 random ones of a wider."""
    if fmt.bits <= 16:
        return torch.arange(1 << fmt.bits).to(fmt.code_dtype)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << fmt.bits, (1 << 16,), generator=generator).to(fmt.code_dtype)


def random_bits(count: int, seed: int) -> torch.Tensor:
    """float32 of uniformly random bits: NaN, inf, subnormals and every magnitude among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)


def random_in_range(fmt: Format, count: int, seed: int) -> torch.Tensor:
    """float32 of random bits from half the smallest subnormal to just beyond the largest number."""
    edges = torch.tensor([fmt.smallest_subnormal / 4, min(fmt.largest * 1.5, 3.4e38)])
    low, high = edges.view(torch.int32).tolist()
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(low, high, (count,), generator=generator)
    sign = torch.randint(0, 2, (count,), generator=generator) << 31
    return (magnitude | sign).to(torch.int32).view(torch.float32)


def edges(fmt: Format) -> torch.Tensor:
    """Every number of the format, every tie between neighbours, one float32 to both sides, and the specials."""
    codes = all_codes(fmt).long() & ((1 << (fmt.bits - 1)) - 1)
    codes = codes[codes <= fmt.largest_code].unique()
    exponent, mantissa = codes >> fmt.mantissa_bits, codes & ((1 << fmt.mantissa_bits) - 1)
    lead = torch.where(exponent > 0, float(1 << fmt.mantissa_bits), 0.0).double()
    numbers = (lead + mantissa) * torch.exp2(exponent.clamp(min=1).double() - fmt.offset - fmt.mantissa_bits)
    ties = numbers + torch.exp2(exponent.clamp(min=1).double() - fmt.offset - fmt.mantissa_bits - 1)
    bits = torch.cat([numbers, ties]).float().view(torch.int32)
    special = torch.tensor([0, 1, 0x7FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF])
    bits = torch.cat([bits, bits + 1, (bits - 1).clamp(min=0), special.to(torch.int32)])
    return torch.cat([bits, bits | -(2**31)]).view(torch.float32)


def assert_same(got: torch.Tensor, want: torch.Tensor, x: torch.Tensor) -> None:
    """Same bits, -0.0 apart from 0.0; any NaN is as good as another."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    bits = torch.int32 if got.element_size() == 4 else torch.int16
    bad = (got.view(bits) != want.view(bits)) & ~(got.isnan() & want.isnan())
    rows = [f"{a!r}: {b!r}, not {c!r}" for a, b, c in zip(*(t[bad][:5].tolist() for t in (x, got, want)), strict=True)]
    assert not rows, f"{int(bad.sum())} differ: " + "; ".join(rows)


def assert_same_codes(got: torch.Tensor, want: torch.Tensor, x: torch.Tensor, fmt: Format) -> None:
    """Same codes; where the format has NaN codes, a NaN may have any payload and sign."""
    assert got.dtype == fmt.code_dtype
    bad = got.long() != want.long()
    if fmt.nan_code is not None:
        above = fmt.largest_code + (fmt.specials == "ieee")
        bad &= ~(x.isnan() & ((got.long() & ((1 << (fmt.bits - 1)) - 1)) > above))
    rows = [f"{a!r}: {b}, not {c}" for a, b, c in zip(*(t[bad][:5].tolist() for t in (x, got, want)), strict=True)]
    assert not rows, f"{int(bad.sum())} differ: " + "; ".join(rows)
