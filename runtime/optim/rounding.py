"""Rounding of float32 values to a format inside an optimizer step, and the random bits of stochastic rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.numerics.codec import INFINITY, MAGNITUDE, QUIET_NAN, SIGN, format_row, overflow_threshold, round_with_row
from fxprec.numerics.codec_rows import dither_with_row
from fxprec.numerics.formats import FP32, Format

_FLOAT32_MIN_EXPONENT = -126


def nearest(x: Tensor, fmt: Format) -> Tensor:
    """Return float32 ``x`` rounded to nearest, ties to even; the bits of `codec.round_with_row`, NaN quieted."""
    if fmt == FP32:
        return x
    row = format_row(fmt)
    if not _has_float32_exponents(fmt):
        return round_with_row(x, *row[1:])
    bits = x.view(torch.int32)
    if row.largest + (1 << row.shift) == row.overflow == INFINITY:
        # The carry past the largest number is inf, so the sign can stay where it is: 9 operations for 14.
        rounded = (bits + (row.addend + ((bits >> row.shift) & 1))) & -(1 << row.shift)
        return torch.where(x != x, QUIET_NAN | (bits & SIGN), rounded).view(torch.float32)
    magnitude = bits & MAGNITUDE
    rounded = ((magnitude + row.addend + ((magnitude >> row.shift) & 1)) >> row.shift) << row.shift
    rounded = torch.where(rounded > row.largest, row.overflow, rounded)
    rounded = torch.where(magnitude > INFINITY, QUIET_NAN, rounded)
    return (rounded | (bits & SIGN)).view(torch.float32)


def stochastic(x: Tensor, random: Tensor, fmt: Format) -> Tensor:
    """Return float32 ``x`` rounded up in magnitude with probability (|x| - down) / (up - down), else down.

    ``random`` (int32, shape of ``x``) is uniform in [0, 2^31). The bits of `codec_rows.dither_with_row`, NaN quieted.
    """
    if fmt == FP32:
        return x
    row = format_row(fmt)
    if not _has_float32_exponents(fmt):
        return dither_with_row(x, random, *row[1:])
    # Random bits added below the kept mantissa, then truncated (ALGORITHMS.md section 6).
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    below = ((1 << row.shift) - 1) - (random >> (31 - row.shift))
    rounded = ((magnitude + below) >> row.shift) << row.shift
    threshold = overflow_threshold(row.shift, row.largest)
    assert isinstance(threshold, int)
    rounded = torch.where(magnitude > row.largest, row.largest, rounded)
    rounded = torch.where(magnitude >= threshold, row.overflow, rounded)
    rounded = torch.where(magnitude > INFINITY, QUIET_NAN, rounded)
    return (rounded | (bits & SIGN)).view(torch.float32)


def _has_float32_exponents(fmt: Format) -> bool:
    """Whether the format's numbers are float32's with a shorter mantissa, subnormals among them."""
    return fmt.min_exponent == _FLOAT32_MIN_EXPONENT and 0 < fmt.mantissa_bits < 23


def mix(x: Tensor) -> Tensor:
    """Return int32 ``x`` scrambled, one to one: every bit of the result depends on every bit of ``x``.

    Source: Wellons, "Prospecting for hash functions" (2018), lowbias32.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def random_bits(index: Tensor, key0: Tensor, key1: Tensor, step: Tensor) -> Tensor:
    """Return 31 random bits (int32) for each element index, another set for each key and each step.

    A pure function of its arguments: the same on every device and on every rank.
    """
    return mix(mix(index ^ key0) + mix(key1 + step)) & MAGNITUDE


def keys_of(seed: int, *path: int) -> tuple[int, int]:
    """Return two int32 keys for a place, such as (parameter, shard), under a seed. Source: splitmix64."""
    state = seed & _WORD
    for part in (0, *path):
        state = _splitmix(state ^ _splitmix(part & _WORD))
    low, high = state & 0xFFFFFFFF, state >> 32
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


_WORD = (1 << 64) - 1


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
