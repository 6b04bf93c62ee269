"""Encode and decode blocks: the one definition from which the code of every kernel is derived, as in `codec`.

The first part works pointwise on the numbers that a block shares and on its elements. It is printed for the C++ kernel
(`block_cpp`) and the Triton kernels (`block_device`). The second part adds reductions and packing for eager torch and
Inductor; kernels do these in their own loops. Reductions compare integers (magnitude bits, or `ordered` ones), so that
no NaN is lost. Definitions: docs/algorithms.md, "Block formats".
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from fxprec.numerics import codec, directed
from fxprec.numerics.blocks import BlockFormat, Integer, find_blocks
from fxprec.numerics.formats import BF16, E4M3FN, Format
from fxprec.numerics.rows import (
    INFINITY,
    MAGNITUDE,
    QUIET_NAN,
    CodeRow,
    FormatRow,
    Scalar,
    as_float,
    code_row,
    float_bits,
    format_row,
)

E8M0_NAN = 255
_MANTISSA = (1 << 23) - 1
_HALF = 1 << 16  # 1 above the float32 bits that bfloat16 lacks
_SMALLEST_NORMAL = 1 << 23
_LEAST_TENSOR_SCALE = 2.0**-100
_TWO_23 = 2.0**23  # adding and subtracting it rounds a smaller number to an integer
_WHOLE = float_bits(_TWO_23)


class BlockRow(NamedTuple):
    """A block format's constants, as int32 numbers; "bits" are those of a float32."""

    largest_exponent: Scalar
    """Exponent of the element format's largest number; e8m0 only."""
    carry: Scalar
    """Added to the largest magnitude's bits before its exponent is read; e8m0 only."""
    largest: Scalar
    """Bits of the element's largest number."""


def block_row(fmt: BlockFormat, *, stochastic: bool) -> BlockRow:
    """Return the row of ``fmt``.

    OCP's scale is the binade of the largest magnitude, and elements that exceed the element's largest number saturate.
    Stochastic codes must not saturate, or their mean would differ from the number. So their scale is rounded up to the
    next power of two, as is a scale of ``e8m0up``.
    """
    if isinstance(fmt.element, Integer):
        return BlockRow(0, 0, float_bits(fmt.element.largest))
    mantissa, exponent = math.frexp(fmt.element.largest)
    carry = _MANTISSA - (float_bits(mantissa) & _MANTISSA) if stochastic or fmt.scale == "e8m0up" else 0
    return BlockRow(exponent - 1, carry, float_bits(fmt.element.largest))


def scale_format(fmt: BlockFormat) -> Format:
    """Return the format of a scale that is not a power of two."""
    return E4M3FN if fmt.scale == "e4m3fn" else BF16


# The numbers that a block's elements share.


def power_scale(amax: Tensor, row: BlockRow) -> Tensor:
    """Return the e8m0 code of a block's scale, from the bits of its largest magnitude."""
    raised = amax + row.carry  # wraps for NaN
    code = torch.clamp_min((raised >> 23) - row.largest_exponent, 0)
    return torch.where(amax >= INFINITY, E8M0_NAN, code)


def power_inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale for an e8m0 code that `power_scale` makes, exactly."""
    return ((254 - scale) << 23).view(torch.float32)


def power_factors(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return two factors whose product is the scale of an e8m0 code; the smallest scale is no normal float32."""
    half = scale >> 1
    first = ((half + 64) << 23).view(torch.float32)
    second = ((scale - half + 63) << 23).view(torch.float32)
    return torch.where(scale == E8M0_NAN, math.nan, first), second


def coded_scale(
    amax: Tensor, whole: object, row: BlockRow, form: FormatRow[Scalar], code: CodeRow[Scalar], *, stochastic: bool
) -> Tensor:
    """Return the code of a block's scale in a format; ``whole`` is the tensor's scale, if it has one."""
    share = amax.view(torch.float32) / as_float(row.largest)
    share = share if whole is None else share / whole
    rounded = directed.raised(share, form) if stochastic else codec.nearest(share, form)
    return codec.codes(torch.where(amax >= INFINITY, math.nan, rounded), form, code)


def inverse_or_zero(scale: Tensor, whole: Tensor | None = None) -> Tensor:
    """Return 1 / (scale * ``whole``); 0 where the scale is below the normal numbers, so that all elements become 0."""
    inverse = torch.reciprocal(scale) if whole is None else torch.reciprocal(whole) / scale
    return torch.where(scale < 2.0**-126, 0.0, inverse)


def ordered(bits: Tensor) -> Tensor:
    """Map float32 bits to integers in the order of the numbers, with NaN beyond inf at both ends, or map them back."""
    return bits ^ ((bits >> 31) & MAGNITUDE)


def range_scale(low: Tensor, high: Tensor, row: BlockRow) -> tuple[Tensor, Tensor]:
    """Return scale and offset of integers, bfloat16 numbers as float32, from the bits of a block's ends.

    The offset is rounded down and the scale up, so that every element is between the smallest and largest integer.
    """
    offset = torch.where(low < 0, low + (_HALF - 1), low) & -_HALF
    spread = high.view(torch.float32) - offset.view(torch.float32)
    share = (spread / as_float(row.largest)).view(torch.int32)
    scale = torch.where(share < _SMALLEST_NORMAL, 0, (share + (_HALF - 1)) & -_HALF)
    # If an end is NaN or inf, the spread is not below inf or the rounded scale is not.
    known = (spread < math.inf) & (scale < INFINITY)
    return torch.where(known, scale, QUIET_NAN).view(torch.float32), torch.where(known, offset, QUIET_NAN).view(
        torch.float32
    )


# The elements of a block.


def integer(x: Tensor, inverse: Tensor, offset: Tensor, row: BlockRow) -> Tensor:
    """Return the nearest integer, ties to even, as a code."""
    return (_place(x, inverse, offset, row) + _TWO_23).view(torch.int32) - _WHOLE


def dithered_integer(x: Tensor, random: Tensor, inverse: Tensor, offset: Tensor, row: BlockRow) -> Tensor:
    """Return the integer below, or with the probability of the remainder (in steps of 2^-23) the integer above."""
    place = _place(x, inverse, offset, row)
    anchored = place + _TWO_23
    nearest = anchored - _TWO_23
    whole, is_above = anchored.view(torch.int32) - _WHOLE, nearest > place
    down = torch.where(is_above, whole - 1, whole)
    left = place - torch.where(is_above, nearest - 1.0, nearest)
    # A number below 1 from random bits, exactly.
    draw = ((random >> 8) + float_bits(1.0)).view(torch.float32) - 1.0
    return torch.where(draw < left, down + 1, down)


def _place(x: Tensor, inverse: Tensor, offset: Tensor, row: BlockRow) -> Tensor:
    """Return an element's position among the integers. No compiler fuses the product into an fma with the later add."""
    return torch.clamp_max((x - offset) * inverse, as_float(row.largest))


def integer_number(code: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Return the number of an integer code; the product is exact."""
    return ((code + _WHOLE).view(torch.float32) - _TWO_23) * scale + offset


def salted(seed: Tensor, cast: int) -> Tensor:
    """Return the seed of one of several casts that share a seed."""
    return seed + salt_of(cast)


def salt_of(cast: int) -> int:
    """Return the int32 that is added to the seed for a cast."""
    salt = cast * 0x9E3779B1 % (1 << 32)
    return salt - (salt >> 31 << 32)


def random_bits(index: Tensor, seed: Tensor | int) -> Tensor:
    """Return 31 random bits for an element, from its position in the tensor and the cast's seed, both int32.

    Two rounds of a 32-bit mixer (xor-shift-multiply, constants of C. Wellons' search). With one round, another seed
    would only permute the same sequence.
    """
    return _mixed(_mixed(index) + seed) & MAGNITUDE


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)


# The functions below fold one format's constants in. Eager torch, Inductor and Triton use them.


class Head(NamedTuple):
    """The numbers that a block's elements share. Without an offset, ``offset`` and ``origin`` are None."""

    scale: Tensor
    """Code of the scale, int32."""
    offset: Tensor | None
    """Code of the offset, int32."""
    inverse: Tensor
    """Factor of an element after ``origin`` is subtracted."""
    origin: Tensor | None


def head(ends: tuple[Tensor, ...], fmt: BlockFormat, whole: Tensor | None, *, stochastic: bool) -> Head:
    """Return a block's head, from the bits of its largest magnitude or of its `ordered` least and largest number."""
    row = block_row(fmt, stochastic=stochastic)
    if fmt.has_offset:
        low, high = map(ordered, ends)
        scale, offset = range_scale(low, high, row)
        return Head(_upper_bits(scale), _upper_bits(offset), inverse_or_zero(scale), offset)
    (amax,) = ends
    if fmt.has_power_scale:
        code = power_scale(amax, row)
        return Head(code, None, power_inverse(code), None)
    form = scale_format(fmt)
    rows = format_row(form), code_row(form)
    code = coded_scale(amax, whole, row, *rows, stochastic=stochastic)
    return Head(code, None, inverse_or_zero(codec.numbers(code, *rows), whole), None)


def _upper_bits(number: Tensor) -> Tensor:
    """Return the bfloat16 code of a float32 number."""
    return number.view(torch.int32) >> 16 & 0xFFFF


def element_codes(x: Tensor, inverse: Tensor, origin: Tensor | None, random: Tensor | None, fmt: BlockFormat) -> Tensor:
    """Return the int32 codes of a block's elements, rounded stochastically if ``random`` has bits for it."""
    if isinstance(fmt.element, Integer):
        assert origin is not None
        row = block_row(fmt, stochastic=random is not None)
        if random is None:
            return integer(x, inverse, origin, row)
        return dithered_integer(x, random, inverse, origin, row)
    form, scaled = format_row(fmt.element), x * inverse
    rounded = scaled if random is None else directed.dithered(scaled, random, form)
    return codec.codes(rounded, form, code_row(fmt.element))


def numbers(code: Tensor, scale: Tensor, offset: Tensor | None, whole: Tensor | None, fmt: BlockFormat) -> Tensor:
    """Return the float32 numbers of element codes, given the codes of the block's scale and offset."""
    if isinstance(fmt.element, Integer):
        assert offset is not None
        return integer_number(code, *((end << 16).view(torch.float32) for end in (scale, offset)))
    found = codec.numbers(code, format_row(fmt.element), code_row(fmt.element))
    if fmt.has_power_scale:
        first, second = power_factors(scale)
        return found * first * second
    form = scale_format(fmt)
    factor = codec.numbers(scale, format_row(form), code_row(form))
    return found * (factor if whole is None else factor * whole)


# Whole tensors, for eager torch and for Inductor.


class Encoded(NamedTuple):
    """A tensor in blocks: packed codes (blocks, bytes) uint8; a block's scale and offset as int32 codes (blocks, 1)."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None


def tensor_scale(x: Tensor, fmt: BlockFormat) -> Tensor:
    """Return the float32 (1,) that multiplies all scales, so that the largest scale becomes e4m3fn's largest number.

    It is at least 2^-100, so that the inverse of a product of scales is a float32.
    """
    assert isinstance(fmt.element, Format)
    bits = x.to(torch.float32).view(torch.int32) & MAGNITUDE
    amax = torch.amax(bits).view(1) if x.numel() else torch.zeros(1, dtype=torch.int32, device=x.device)
    share = torch.clamp_min(amax.view(torch.float32) / (fmt.element.largest * E4M3FN.largest), _LEAST_TENSOR_SCALE)
    return torch.where(amax >= INFINITY, math.nan, share)


def encode(x: Tensor, fmt: BlockFormat, whole: Tensor | None = None, seed: Tensor | None = None) -> Encoded:
    """Encode a tensor's elements in row-major order; ``seed`` (1,) int32 rounds stochastically, None to nearest.

    The last block is padded with the last element.
    """
    blocks = _in_blocks(x.to(torch.float32).reshape(-1), fmt.block)
    parts = _of_one_byte(blocks, fmt.bits)
    random: list[Tensor | None] = [None] * len(parts)
    if seed is not None:
        index = torch.arange(blocks.numel(), device=x.device).to(torch.int32).view(blocks.shape)
        random = [random_bits(part, seed) for part in _of_one_byte(index, fmt.bits)]
    bits = [part.view(torch.int32) for part in parts]
    if fmt.has_offset:
        keys = [ordered(part) for part in bits]
        low, high = reduce(torch.minimum, keys), reduce(torch.maximum, keys)
        ends: tuple[Tensor, ...] = torch.amin(low, 1, keepdim=True), torch.amax(high, 1, keepdim=True)
    else:
        ends = (torch.amax(reduce(torch.maximum, [part & MAGNITUDE for part in bits]), 1, keepdim=True),)
    scale, offset, inverse, origin = head(ends, fmt, whole, stochastic=seed is not None)
    codes = [
        element_codes(*part, fmt) for part in ((x, inverse, origin, r) for x, r in zip(parts, random, strict=True))
    ]
    return Encoded(_joined(codes, fmt.bits), scale, offset)


def _of_one_byte(blocks: Tensor, bits: int) -> list[Tensor]:
    """Return the first elements of all bytes, the second ones and so on; the blocks if a byte's end cuts an element.

    With them Inductor encodes and packs in one loop. With whole blocks it writes 4 bytes for each code in between.
    """
    count, size = word(bits)
    if size > 1 or count == 1:
        return [blocks]
    groups = blocks.view(blocks.shape[0], blocks.shape[1] // count, count)
    return [groups[..., i] for i in range(count)]


def _joined(codes: list[Tensor], bits: int) -> Tensor:
    """Return the codes of `_of_one_byte` as `packed` does."""
    if len(codes) == 1:
        return packed(codes[0], bits)
    return reduce(torch.bitwise_or, [code << i * bits for i, code in enumerate(codes)]).to(torch.uint8)


def _in_blocks(x: Tensor, block: int) -> Tensor:
    missing = -x.shape[0] % block
    if missing:
        x = torch.cat([x, x[-1:].expand(missing)])
    return x.view(x.shape[0] // block, block)


def decode(encoded: Encoded, fmt: BlockFormat, elements: object, whole: Tensor | None = None) -> Tensor:
    """Return the first ``elements`` numbers, (elements,) float32."""
    codes, scales, offsets = encoded
    return numbers(unpacked(codes, fmt.bits), scales, offsets, whole, fmt).reshape(-1)[:elements]


def stored(x: Tensor, seed: Tensor | None, whole: Tensor | None, row: int, format: str) -> Tensor:
    """Return the `records` of a tensor in a block format; each ``row`` draws different random bits from the seed."""
    fmt = find_blocks(format)
    return records(encode(x, fmt, whole, None if seed is None else salted(seed, row)), fmt)


def loaded(q: Tensor, whole: Tensor | None, row: int, format: str, elements: object, dtype: torch.dtype) -> Tensor:
    """Return the first ``elements`` numbers of what `stored` returned, (elements,)."""
    fmt = find_blocks(format)
    return decode(from_records(q, fmt), fmt, elements, whole).to(dtype)


def records(encoded: Encoded, fmt: BlockFormat) -> Tensor:
    """Return blocks as stored for backward, (blocks, bytes) uint8: scale, offset, codes."""
    ends = [end for end in encoded[1:] if end is not None]
    shifts = range(0, 8 * fmt.scale_dtype.itemsize, 8)
    heads = [(end >> shift & 0xFF).to(torch.uint8) for end in ends for shift in shifts]
    return torch.cat([*heads, encoded.codes], 1)


def from_records(stored: Tensor, fmt: BlockFormat) -> Encoded:
    """Return the blocks that `records` stored."""
    size = fmt.scale_dtype.itemsize
    ends = []
    for first in range(0, fmt.head_bytes, size):
        heads = [stored[:, first + i : first + i + 1].to(torch.int32) << 8 * i for i in range(size)]
        ends.append(heads[0] if size == 1 else heads[0] | heads[1])
    return Encoded(stored[:, fmt.head_bytes :], ends[0], ends[1] if fmt.has_offset else None)


def word(bits: int) -> tuple[int, int]:
    """Return the smallest number of codes that fills whole bytes, and the number of these bytes."""
    size = math.lcm(bits, 8)
    return size // bits, size // 8


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return int32 codes (blocks, n) as uint8 (blocks, bytes), the first code in the lowest bits."""
    count, size = word(bits)
    words = codes.view(codes.shape[0], codes.shape[1] // count, count) << _steps(count, bits, codes)
    spread = torch.sum(words, 2, keepdim=True, dtype=torch.int32) >> _steps(size, 8, codes)
    return (spread & 0xFF).to(torch.uint8).view(codes.shape[0], codes.shape[1] * bits // 8)


def unpacked(code: Tensor, bits: int) -> Tensor:
    """Return the int32 codes (blocks, n) of `packed` bytes."""
    count, size = word(bits)
    wide = code.to(torch.int32).reshape(code.shape[0], code.shape[1] // size, size) << _steps(size, 8, code)
    spread = torch.sum(wide, 2, keepdim=True, dtype=torch.int32) >> _steps(count, bits, code)
    return (spread & ((1 << bits) - 1)).view(code.shape[0], code.shape[1] * 8 // bits)


def _steps(count: int, bits: int, like: Tensor) -> Tensor:
    return torch.arange(0, count * bits, bits, dtype=torch.int32, device=like.device)
