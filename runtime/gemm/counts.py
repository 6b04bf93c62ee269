"""Statistics inside kernels: counts of a tile, added to the tensor's with one atomic each."""

from __future__ import annotations

import triton
import triton.language as tl

from fxprec.numerics import rows
from fxprec.numerics.formats import Format
from fxprec.numerics.rows import Thresholds, format_row

COUNTS = 8
"""Entries of the counts, int64: overflowed, underflowed, float32 bits of amax, elements; then, as float64 and in steps
that measure moments: non-zero elements (-1: not measured), sums of squares, of ln|x| and of its squares, as stored."""


def thresholds(fmt: Format) -> Thresholds[int]:
    """Return what `add_counts` compares magnitude bits with."""
    return rows.thresholds(format_row(fmt))


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


@triton.jit
def add_moments(stored, inside, counts_ptr):  # type: ignore[no-untyped-def]
    """Add a tile's moments, in float64, where the order of the atomics is lost in rounding to float32."""
    sums = (counts_ptr + 4).to(tl.pointer_type(tl.float64))
    nonzero = inside & ((stored.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0)
    known = tl.where(inside, stored, 0.0)
    logs = tl.log(tl.where(nonzero, tl.abs(stored), 1.0))
    tl.atomic_add(sums, tl.sum(tl.ravel(tl.where(nonzero, 1, 0))).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(tl.ravel(known * known)).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums + 2, tl.sum(tl.ravel(logs)).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums + 3, tl.sum(tl.ravel(logs * logs)).to(tl.float64), sem="relaxed")


@triton.jit
def no_moments(counts_ptr):  # type: ignore[no-untyped-def]
    """Say that no moments are taken."""
    tl.store((counts_ptr + 4).to(tl.pointer_type(tl.float64)), -1.0)
