"""Encode and decode blocks element by element, in exact fractions: the reference for `block_codec`.

Numbers that are float32 by definition are float32 here too, through NumPy: a block's scale, its inverse and their
products with the elements. Elements, packing and random bits share no code with `block_codec`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch

from fxprec.numerics.blocks import BlockFormat, Integer
from fxprec.numerics.formats import BF16, E4M3FN, Format
from fxprec.numerics.reference import reference_decode

_F = np.float32


class ReferenceBlocks(NamedTuple):
    """``codes`` of the elements, one a list entry, before packing; NaN blocks have scale NaN."""

    codes: list[list[int]]
    scales: list[float]
    offsets: list[float]

    def bytes(self, fmt: BlockFormat) -> bytes:
        """Return the packed codes: all bits one after another, the lowest first."""
        word = 0
        for i, code in enumerate(code for block in self.codes for code in block):
            word |= code << (i * fmt.bits)
        return word.to_bytes(len(self.codes) * fmt.code_bytes, "little")

    def values(self, fmt: BlockFormat, elements: int, whole: float = 1.0) -> list[float]:
        """Return the numbers that the codes mean."""
        found = []
        with np.errstate(all="ignore"):
            for codes, scale, offset in zip(self.codes, self.scales, self.offsets, strict=True):
                if isinstance(fmt.element, Integer):
                    found += [_F(_F(_F(code) * _F(scale)) + _F(offset)) for code in codes]
                elif math.isnan(scale):
                    found += [_F(math.nan)] * len(codes)
                else:
                    factor = _F(scale) * _F(whole) if fmt.tensor_scale else scale
                    found += [_F(np.float64(_number(fmt.element, code)) * np.float64(factor)) for code in codes]
        return [float(x) for x in found[:elements]]


def reference_tensor_scale(x: Sequence[float], fmt: BlockFormat) -> float:
    """Return a tensor's float32 scale."""
    assert isinstance(fmt.element, Format)
    if not all(math.isfinite(v) for v in x):
        return math.nan
    amax = max(map(abs, x), default=0.0)
    return float(max(_F(amax) / _F(fmt.element.largest * E4M3FN.largest), _F(2.0**-100)))


def reference_encode_blocks(
    x: Sequence[float], fmt: BlockFormat, whole: float = 1.0, seed: int | None = None
) -> ReferenceBlocks:
    """Encode float32 numbers; ``seed`` rounds at random."""
    filled = [*x, *[x[-1]] * (-len(x) % fmt.block)] if x else []
    found = ReferenceBlocks([], [], [])
    for start in range(0, len(filled), fmt.block):
        draws = None if seed is None else [reference_random(start + i, seed) for i in range(fmt.block)]
        with np.errstate(all="ignore"):
            encode = _integers if isinstance(fmt.element, Integer) else partial(_floats, whole=whole)
            codes, scale, offset = encode(filled[start : start + fmt.block], fmt, draws)
        found.codes.append(codes)
        found.scales.append(scale)
        found.offsets.append(offset)
    return found


_Block = tuple[list[int], float, float]


def _integers(x: Sequence[float], fmt: BlockFormat, draws: list[int] | None) -> _Block:
    assert isinstance(fmt.element, Integer)
    levels = fmt.element.largest
    if not all(map(math.isfinite, x)):
        return [0] * len(x), math.nan, math.nan
    offset = _directed_bfloat16(min(x), math.floor)
    share = (_F(max(x)) - _F(offset)) / _F(levels)
    if not np.isfinite(share) or not math.isfinite(scale := _integer_scale(float(share))):
        return [0] * len(x), math.nan, math.nan
    inverse = _F(1) / _F(scale) if scale else _F(0)
    codes = []
    for i, v in enumerate(x):
        place = Fraction(float((_F(v) - _F(offset)) * inverse))
        down, left = math.floor(place), place - math.floor(place)
        draw = None if draws is None else Fraction(draws[i] >> 8, 1 << 23)
        up = (left > Fraction(1, 2) or (left == Fraction(1, 2) and down % 2 == 1)) if draw is None else draw < left
        codes.append(min(max(down + up, 0), levels))
    return codes, scale, offset


def _integer_scale(share: float) -> float:
    return 0.0 if share < 2.0**-126 else _directed_bfloat16(share, math.ceil)


def _directed_bfloat16(x: float, whole: Callable[[Fraction], int]) -> float:
    """Return a float32 rounded down or up to a bfloat16, subnormals among them."""
    if x == 0:
        return x
    exponent = max(math.frexp(x)[1] - 1, -126) - 7
    unit = Fraction(2) ** exponent
    rounded = float(whole(Fraction(x) / unit) * unit)
    return math.copysign(math.inf, x) if abs(rounded) >= 2.0**128 else rounded


def _floats(x: Sequence[float], fmt: BlockFormat, draws: list[int] | None, whole: float) -> _Block:
    assert isinstance(fmt.element, Format)
    amax = max(map(abs, x)) if all(map(math.isfinite, x)) else math.nan
    scale = _scale(amax, fmt, whole, stochastic=draws is not None)
    if math.isnan(scale):
        return [0] * len(x), math.nan, 0.0
    inverse = _F(1) / _F(whole) / _F(scale) if scale >= 2.0**-126 or fmt.scale.startswith("e8m0") else _F(0)
    elements = [float(_F(v) * inverse) for v in x]
    return [_code(fmt.element, v, None if draws is None else draws[i]) for i, v in enumerate(elements)], scale, 0.0


def _scale(amax: float, fmt: BlockFormat, whole: float, *, stochastic: bool) -> float:
    assert isinstance(fmt.element, Format)
    if math.isnan(amax) or math.isnan(whole):
        return math.nan
    if fmt.scale.startswith("e8m0"):
        exponent, stochastic = -127, stochastic or fmt.scale == "e8m0up"
        top = math.frexp(fmt.element.largest)[1]
        while not _reaches(amax, exponent, fmt.element.largest if stochastic else 2.0**top, strictly=not stochastic):
            exponent += 1
        return math.ldexp(1.0, exponent)
    share = float(_F(amax) / _F(fmt.element.largest))
    if fmt.tensor_scale:
        share = float(_F(share) / _F(whole))
    form = E4M3FN if fmt.scale == "e4m3fn" else BF16
    return min(_round_up(share, form) if stochastic else _nearest(share, form), form.largest)


def _reaches(amax: float, exponent: int, largest: float, *, strictly: bool) -> bool:
    return (amax < math.ldexp(largest, exponent)) if strictly else (amax <= math.ldexp(largest, exponent))


def _round_up(x: float, form: Format) -> float:
    below = _nearest(x, form)
    unit = 2.0 ** (max(math.frexp(x)[1] - 1, form.min_exponent) - form.mantissa_bits) if x else 0.0
    return below if below >= x else below + unit


def _nearest(x: float, form: Format) -> float:
    unit = Fraction(2) ** (max(math.frexp(x)[1] - 1, form.min_exponent) - form.mantissa_bits) if x else Fraction(1)
    return float(round(Fraction(x) / unit) * unit)  # Python's round is to even


@cache
def _numbers(element: Format) -> tuple[list[Fraction], Format]:
    codes = torch.arange(element.largest_code + 1, device="cpu").to(element.code_dtype)
    return [Fraction(v) for v in reference_decode(codes, element, torch.float64).tolist()], element


def _number(element: Format | Integer, code: int) -> float:
    assert isinstance(element, Format)
    sign = code >> (element.bits - 1)
    return math.copysign(float(_numbers(element)[0][code & ((1 << (element.bits - 1)) - 1)]), -sign or 1)


def _code(element: Format, x: float, draw: int | None) -> int:
    numbers, sign = _numbers(element)[0], (math.copysign(1, x) < 0) << (element.bits - 1)
    magnitude = Fraction(abs(x))
    down = bisect_right(numbers, magnitude) - 1
    if down == len(numbers) - 1:
        return sign + down
    left = (magnitude - numbers[down]) / (numbers[down + 1] - numbers[down])
    if draw is None:
        return sign + down + (left > Fraction(1, 2) or (left == Fraction(1, 2) and down % 2 == 1))
    return sign + down + (Fraction(draw, 1 << 31) < left)


def reference_random(index: int, seed: int) -> int:
    """Return an element's 31 random bits."""
    return _mix((_mix(index) + seed) % (1 << 32)) % (1 << 31)


def _mix(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor % (1 << 32)
    return x ^ (x >> 16)
