"""Statistics inside kernels: counts of a tile, added to the tensor's with one atomic each."""

from __future__ import annotations

import triton
import triton.language as tl

from fxprec.codec import format_row, overflow_threshold
from fxprec.formats import Format

COUNTS = 4
"""Entries of the counts: overflowed, underflowed, float32 bits of amax, elements; int64."""


def thresholds(fmt: Format) -> tuple[int, int]:
    """Return the magnitude bits from which a number overflows, and up to which it underflows."""
    row = format_row(fmt)
    overflow = overflow_threshold(row.shift, row.largest)
    assert isinstance(overflow, int)
    return overflow, row.underflow


@triton.jit
def add_counts(x, stored, inside, counts_ptr, LIMITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count a tile of ``x``, which is ``stored`` after scaling. NaN lies above infinity, so it wins amax."""
    magnitude = stored.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    over = tl.where(inside & (magnitude >= LIMITS[0]), 1, 0)
    under = tl.where(inside & (magnitude > 0) & (magnitude <= LIMITS[1]), 1, 0)
    wide = tl.where(inside, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.atomic_add(counts_ptr, tl.sum(tl.ravel(over)).to(tl.int64), sem="relaxed")
    tl.atomic_add(counts_ptr + 1, tl.sum(tl.ravel(under)).to(tl.int64), sem="relaxed")
    tl.atomic_max(counts_ptr + 2, tl.max(tl.ravel(wide), 0).to(tl.int64), sem="relaxed")
