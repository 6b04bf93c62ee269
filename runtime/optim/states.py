"""Averages as 8-bit codes in blocks: each block of 64 elements shares a power of two.

Codes are numbers of a small float format, so that a block's grid stays where it is while its largest element changes.
A mean has a sign, 2 exponent bits and 5 mantissa bits. An average of squares needs no sign and has 3 exponent bits; one
that is not zero never becomes zero, because an update divides by its root. With their scale the numbers of both formats
are numbers of bfloat16, and encoding them again changes nothing. What was measured: docs/optim.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxprec.numerics import codec
from fxprec.numerics.block_codec import E8M0_NAN, BlockRow, power_factors, power_inverse, power_scale
from fxprec.numerics.formats import Format
from fxprec.numerics.rows import MAGNITUDE, code_row, float_bits, format_row
from fxprec.runtime.optim.rounding import dither_bits

BLOCK = 64
"""Elements that share a scale, in the order of a parameter's memory; the last block may have fewer."""
_MEAN = Format(2, 5)
_SQUARE = Format(3, 5, bias=-1)  # its sign bit is not stored
_FORMATS = {"momentum_buffer": _MEAN, "exp_avg": _MEAN, "exp_avg_sq": _SQUARE, "max_exp_avg_sq": _SQUARE}
_SALTS = {"momentum_buffer": 1, "exp_avg": 1, "exp_avg_sq": 2}
_MANTISSA = (1 << 23) - 1
_ANCHOR = 1.5 * 2.0**23  # added to a small number of either sign, rounds it to a whole one
_ANCHOR_BITS = float_bits(_ANCHOR)
_FIRST_DITHER = float_bits(1.0 + 2.0**-17)  # then every 2^-16: 1.5 is never met, so a whole number stays one


def bits(name: str, index: Tensor, integers: Mapping[str, Tensor]) -> Tensor | None:
    """Return the random bits that a new value is rounded by; None: to nearest."""
    if name not in _SALTS:
        return None
    return dither_bits(index, integers["key0"], integers["key1"], integers["step"], _SALTS[name])


def decoded(name: str, code: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 numbers of int32 codes and scales."""
    fmt = _FORMATS[name]
    first, second = power_factors(scale)
    return codec.numbers(code, format_row(fmt), code_row(fmt)) * first * second


def scale_of(name: str, amax: Tensor) -> Tensor:
    """Return the code of a block's scale (int32), from the bits of its largest magnitude; 255 where that is inf or NaN.

    It leaves room to round the largest up, or the mean of what is rounded would not be the number.
    """
    fmt = _FORMATS[name]
    largest = float_bits(fmt.largest)
    return power_scale(amax, BlockRow(fmt.max_exponent, _MANTISSA - (largest & _MANTISSA), largest))


def code_of(name: str, x: Tensor, scale: Tensor, random: Tensor | None) -> Tensor:
    """Return the int32 codes of float32 numbers under their blocks' scales: rounded by random bits, or to nearest.

    A number is counted in units of its binade's last place, to which less than half a unit of dither is added. A mean
    below half of the smallest unit becomes 0: a unit might be many times the root that it is divided by.
    """
    fmt = _FORMATS[name]
    least, mantissa = fmt.min_exponent + 127, fmt.mantissa_bits
    scaled = (x * power_inverse(scale)).view(torch.int32)
    magnitude = scaled & MAGNITUDE
    field = torch.clamp_min(magnitude >> 23, least)
    place = magnitude.view(torch.float32) * ((254 + mantissa - field) << 23).view(torch.float32)
    if random is not None:
        dither = (((random >> 15) << 7) + _FIRST_DITHER).view(torch.float32) - 1.5
        place = place + (dither if fmt is _SQUARE else torch.where(place < 0.5, 0.0, dither))
    whole = (place + _ANCHOR).view(torch.int32) - _ANCHOR_BITS
    size = torch.clamp_max(whole + ((field - least) << mantissa), fmt.largest_code)
    code = torch.where((size == 0) & (x > 0), 1, size) if fmt is _SQUARE else size | ((scaled >> 24) & 128)
    return torch.where(scale == E8M0_NAN, 0, code)


# Whole tensors.


def num_blocks(elements: int) -> int:
    """Return how many blocks hold so many elements."""
    return -(-elements // BLOCK)


def by_element(scales: Tensor, elements: int) -> Tensor:
    """Return, for each element of a flat tensor, what its block has."""
    return scales.repeat_interleave(BLOCK)[:elements]


def amax_of(x: Tensor) -> Tensor:
    """Return the bits of each block's largest magnitude, of a flat float32 tensor."""
    magnitudes = x.view(torch.int32) & MAGNITUDE
    missing = -len(x) % BLOCK
    return torch.cat([magnitudes, magnitudes.new_zeros(missing)]).view(-1, BLOCK).amax(1)


def encode(name: str, x: Tensor, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes and scales, uint8, of a flat float32 tensor; as `code_of`."""
    if not len(x):
        return x.to(torch.uint8), x.to(torch.uint8)
    scales = scale_of(name, amax_of(x))
    return code_of(name, x, by_element(scales, len(x)), random).to(torch.uint8), scales.to(torch.uint8)


def decode(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 numbers of flat `encode`d codes."""
    return decoded(name, codes.int(), by_element(scales.int(), len(codes)))
