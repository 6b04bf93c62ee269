"""Formats and float32 bits that the tests of every codec share."""

from __future__ import annotations

import random

import torch

from fxprec.numerics.formats import Format
from fxprec.numerics.reference import reference_decode

NATIVE = ("bf16", "fp16", "e4m3fn", "e5m2")
NAMED = (*NATIVE, "1-4-3+4", "1-5-2", "1-6-9", "1-3-0", "1-2-1")


WIDE = ("1-5-11", "1-8-8", "1-8-13", "1-3-20-5", "1-8-18", "1-6-23", "1-8-22")  # codes of 32 bits


def random_formats(count: int) -> list[str]:
    pick = random.Random(0)
    names = []
    while len(names) < count:
        exponent, mantissa = pick.randint(1, 8), pick.randint(0, 10)
        if 2 <= 1 + exponent + mantissa <= 16:
            bias = 0 if exponent == 8 else pick.randint(-8, 8)
            names.append(f"1-{exponent}-{mantissa}" + (f"{bias:+d}" if bias else ""))
    return names


def bit_patterns(count: int, fmt: Format) -> torch.Tensor:
    """Random float32 bits, half of them near the format's range, with its edges, ties, zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(1 << 31), 1 << 31, (count // 2,), generator=generator).to(torch.int32)
    near = torch.randn(count // 2, generator=generator) * torch.exp2(
        torch.randint(fmt.min_exponent - 3, fmt.max_exponent + 2, (count // 2,), generator=generator).clamp(-126, 126)
    )
    codes = reference_decode(torch.arange(1 << min(fmt.bits, 12)).to(torch.int32).to(fmt.code_dtype), fmt)
    values = codes[codes.isfinite()]
    ties = (values[1:] + values[:-1]) / 2
    edges = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 3.4e38, fmt.largest]
    return torch.cat([anything.view(torch.float32), near, ties, values, torch.tensor(edges)])
