"""Store averages as codes of 8 or 4 bits in blocks: the 64 elements of a block share a power of two as their scale.

Codes are numbers of a small float format, so a block's grid stays in place while its largest element changes. A mean
has a sign, 2 exponent bits and 5 mantissa bits (1 in 4 bits). An average of squares has no sign and 3 exponent bits. A
non-zero average of squares never becomes zero, because an update divides by its root. With their scales the numbers of
all formats are bfloat16 numbers, and encoding them again changes nothing. Measurements: docs/optim.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fxprec.numerics import codec
from fxprec.numerics.block_codec import E8M0_NAN, BlockRow, power_factors, power_inverse, power_scale
from fxprec.numerics.formats import Format
from fxprec.numerics.rows import MAGNITUDE, code_row, float_bits, format_row
from fxprec.runtime.optim.rounding import dither_bits

BLOCK = 64
"""Elements that share a scale, in the order of a parameter's memory; the last block may have fewer."""
HALF = BLOCK // 2
"""Bytes of a block in 4 bits. The low half of a byte has an element's code, the high half that of element + HALF."""


@dataclass(frozen=True)
class Codes:
    """The codes that one kind of average is stored as."""

    format: Format
    is_square: bool
    """Whether the average is of squares: no sign bit is stored, and a non-zero number never becomes zero."""

    @property
    def is_packed(self) -> bool:
        """Return whether two codes share a byte."""
        return self._sign_at + (not self.is_square) == 4

    @property
    def _sign_at(self) -> int:
        return self.format.exponent_bits + self.format.mantissa_bits

    @property
    def drops_small(self) -> bool:
        """Return whether a mean below half of the smallest number becomes 0. In 4 bits too many means would."""
        return not (self.is_square or self.is_packed)

    def sign(self, bits: Tensor) -> Tensor:
        """Return the sign bit of a code, from the bits of a float32 number."""
        return (bits >> (31 - self._sign_at)) & (1 << self._sign_at)


_CODES = {
    "8bit": (Codes(Format(2, 5), False), Codes(Format(3, 5, bias=-1), True)),
    "4bit": (Codes(Format(2, 1), False), Codes(Format(3, 1, bias=-1), True)),
}
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq")
_SALTS = {"momentum_buffer": 1, "exp_avg": 1, "exp_avg_sq": 2}


def codes_of(form: str, name: str) -> Codes:
    """Return the codes of an average in form "8bit" or "4bit"."""
    return _CODES[form][name in _SQUARES]


_MANTISSA = (1 << 23) - 1
_ANCHOR = 1.5 * 2.0**23  # adding it to a small number of either sign rounds that to a whole number
_ANCHOR_BITS = float_bits(_ANCHOR)
_FIRST_DITHER = float_bits(1.0 + 2.0**-17)  # dithers are 2^-16 apart and, less 1.5, below 0.5: a whole number stays


def bits(name: str, index: Tensor, integers: Mapping[str, Tensor]) -> Tensor | None:
    """Return the random bits by which a new value is rounded; None: it is rounded to nearest."""
    if name not in _SALTS:
        return None
    return dither_bits(index, integers["key0"], integers["key1"], integers["step"], _SALTS[name])


def decoded(codes: Codes, code: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 numbers of int32 codes and scales."""
    fmt = codes.format
    first, second = power_factors(scale)
    return codec.numbers(code, format_row(fmt), code_row(fmt)) * first * second


def scale_of(codes: Codes, amax: Tensor) -> Tensor:
    """Return the code of a block's scale (int32) from the bits of its largest magnitude; 255 if that is inf or NaN.

    The scale leaves room to round the largest element up, so that stochastic rounding keeps its mean.
    """
    fmt = codes.format
    largest = float_bits(fmt.largest)
    return power_scale(amax, BlockRow(fmt.max_exponent, _MANTISSA - (largest & _MANTISSA), largest))


def code_of(codes: Codes, x: Tensor, scale: Tensor, random: Tensor | None) -> Tensor:
    """Return the int32 codes of float32 numbers under their blocks' scales, rounded by random bits or to nearest.

    A number is counted in units of its binade's last place, and less than half a unit of dither is added. In 8 bits a
    mean below half of the smallest unit becomes 0, because a unit may be many times the root that divides the mean.
    """
    fmt = codes.format
    least, mantissa = fmt.min_exponent + 127, fmt.mantissa_bits
    scaled = (x * power_inverse(scale)).view(torch.int32)
    magnitude = scaled & MAGNITUDE
    field = torch.clamp_min(magnitude >> 23, least)
    place = magnitude.view(torch.float32) * ((254 + mantissa - field) << 23).view(torch.float32)
    if random is not None:
        dither = (((random >> 15) << 7) + _FIRST_DITHER).view(torch.float32) - 1.5
        place = place + (torch.where(place < 0.5, 0.0, dither) if codes.drops_small else dither)
    whole = (place + _ANCHOR).view(torch.int32) - _ANCHOR_BITS
    size = torch.clamp_max(whole + ((field - least) << mantissa), fmt.largest_code)
    code = torch.where((size == 0) & (x > 0), 1, size) if codes.is_square else size | codes.sign(scaled)
    return torch.where(scale == E8M0_NAN, 0, code)


# Whole tensors.


def num_blocks(elements: int) -> int:
    """Return the number of blocks of ``elements``."""
    return -(-elements // BLOCK)


def by_element(scales: Tensor, elements: int) -> Tensor:
    """Return the scale of each element of a flat tensor, (elements,), from the scales of the blocks."""
    return scales.repeat_interleave(BLOCK)[:elements]


def amax_of(x: Tensor) -> Tensor:
    """Return the bits of the largest magnitude in each block of a flat float32 tensor."""
    magnitudes = x.view(torch.int32) & MAGNITUDE
    missing = -len(x) % BLOCK
    return torch.cat([magnitudes, magnitudes.new_zeros(missing)]).view(-1, BLOCK).amax(1)


def num_bytes(codes: Codes, elements: int) -> int:
    """Return the bytes of the codes of ``elements``."""
    return HALF * num_blocks(elements) if codes.is_packed else elements


def encode(codes: Codes, x: Tensor, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the bytes of codes and the scales of a flat float32 tensor, rounded as by `code_of`."""
    if not len(x):
        return x.to(torch.uint8), x.to(torch.uint8)
    scales = scale_of(codes, amax_of(x))
    found = code_of(codes, x, by_element(scales, len(x)), random).to(torch.uint8)
    return _packed(found) if codes.is_packed else found, scales.to(torch.uint8)


def decode(codes: Codes, held: Tensor, scales: Tensor, elements: int) -> Tensor:
    """Return the float32 numbers of flat `encode`d codes."""
    each = (_unpacked(held)[:elements] if codes.is_packed else held).int()
    return decoded(codes, each, by_element(scales.int(), elements))


def _packed(codes: Tensor) -> Tensor:
    missing = -len(codes) % BLOCK
    pairs = torch.cat([codes, codes.new_zeros(missing)]).view(-1, 2, HALF)
    return (pairs[:, 0] | (pairs[:, 1] << 4)).view(-1)


def _unpacked(held: Tensor) -> Tensor:
    pairs = held.view(torch.uint8).view(-1, HALF)
    return torch.stack([pairs & 15, pairs >> 4], 1).view(-1)
