"""Round float32 values to a format inside an optimizer step, and make the random bits of stochastic rounding."""

from __future__ import annotations

from torch import Tensor

from fxprec.numerics import codec, directed, special
from fxprec.numerics.formats import FP32, Format
from fxprec.numerics.rows import MAGNITUDE, format_row


def nearest(x: Tensor, fmt: Format) -> Tensor:
    """Return float32 ``x`` rounded to nearest, ties to even, with the bits of `codec.nearest` and NaN quieted."""
    if fmt == FP32:
        return x
    row = format_row(fmt)
    if not special.shares_exponents(fmt):
        return codec.nearest(x, row)
    return special.nearest_cut(x, row) if special.carries_into_infinity(row) else special.nearest_short(x, row)


def stochastic(x: Tensor, random: Tensor, fmt: Format) -> Tensor:
    """Return float32 ``x`` rounded up in magnitude with probability (|x| - down) / (up - down), else down.

    ``random`` (int32, shape of ``x``) is uniform in [0, 2^31). Bits are those of `directed.dithered`, NaN quieted.
    """
    if fmt == FP32:
        return x
    if special.shares_exponents(fmt):
        return special.dithered_short(x, random, fmt)
    return directed.dithered(x, random, format_row(fmt))


def mix(x: Tensor) -> Tensor:
    """Return int32 ``x`` scrambled, one to one: every bit of the result depends on every bit of ``x``.

    Source: Wellons, "Prospecting for hash functions" (2018), lowbias32.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def random_bits(index: Tensor, key0: Tensor, key1: Tensor, step: Tensor) -> Tensor:
    """Return 31 random bits (int32) for each element index; each key and each step has different bits.

    A pure function of its arguments: the same on every device and on every rank.
    """
    return mix(mix(index ^ key0) + mix(key1 + step)) & MAGNITUDE


def dither_bits(index: Tensor, key0: Tensor, key1: Tensor, step: Tensor, salt: int) -> Tensor:
    """Return 31 bits (int32) for each element index, which advance by the golden ratio of 2^31 with each step.

    A pure function of its arguments, as `random_bits`. Over many steps these bits round up as often as independent bits
    would, at far more even distances. So an average that moves by a small part of a unit each step stays within about a
    unit. Independent bits let it walk away (docs/optim.md, "States in fewer bits").
    """
    return (mix(mix(index ^ key0) + (key1 + salt)) + step * _GOLDEN) & MAGNITUDE


_GOLDEN = 0x4F1BBCDD  # 2^31 * 0.618...


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
