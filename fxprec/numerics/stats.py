"""Statistics: kernels *count* what rounding does to a tensor, and the host *finishes* counts to statistics.

Inductor's code and the Triton functions below, the C++ kernels and the reference all give one row of float64 per site,
`Counts`. Only `finish` turns sums into ratios and moments. Float64 holds counts of up to 2^53 elements exactly.

Triton kernels count with atomics into striped counters. Counts are int32. Sums are float64, so that the order of the
additions is lost when the reported number is rounded. `gathered` adds the stripes up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fxprec import compat
from fxprec.numerics.codec import lost
from fxprec.numerics.device import IMPORTS
from fxprec.numerics.rows import MAGNITUDE, FormatRow, Scalar


class Counts(NamedTuple):
    """The counts of one cast in one step: a row of float64."""

    overflow: float
    """Number of elements."""
    underflow: float
    """Number of elements; NaN where codes were counted, since a code of zero may be a rounded number or a zero."""
    amax: float
    """Largest magnitude of the cast's input; NaN if the input has a NaN."""
    elements: float
    nonzero: float
    """Number of non-zero elements; -1 in steps that measure no moments."""
    squares: float
    """Sum of the squares of the tensor that the moments are taken of."""
    logs: float
    """Sum of ln|x| over the non-zero elements."""
    squared_logs: float
    carried: float
    """Scale exponent of the cast's input."""
    moments_exp: float
    """Scale exponent of the tensor that the moments are taken of."""


WIDTH = len(Counts._fields)
UNMEASURED = (-1.0, 0.0, 0.0, 0.0)
"""``nonzero`` to ``squared_logs`` where no moments are measured."""


class Statistics(NamedTuple):
    """The statistics of one cast. Ratios are shares of all elements, NaN if unknown; the rest is without the scale."""

    overflow_ratio: float
    underflow_ratio: float
    amax: float
    rms: float = 0.0
    nonzero_ratio: float = -1.0
    mean_ln: float = 0.0
    std_ln: float = 0.0


def finish(rows: Tensor) -> list[Statistics]:
    """Turn rows of counts (n, `WIDTH`) float64 into statistics. An empty tensor has no losses and amax 0."""
    return [Statistics(*row) for row in zip(*finished_columns(rows), strict=True)]


def finished_columns(rows: Tensor) -> tuple[list[float], ...]:
    """Return the fields of `Statistics` for rows of counts (n, `WIDTH`) float64, each as a list of n."""
    with np.errstate(all="ignore"):  # infs and NaNs pass through
        columns = _finished(Counts(*rows.numpy().T))  # each field of all rows
    return tuple(column.tolist() for column in columns)


def _finished(c: Any) -> tuple[Any, ...]:
    share, down = np.maximum(c.elements, 1.0), np.ldexp(1.0, -c.carried.astype(np.int64))
    zeros = np.zeros_like(share)
    basic = (c.overflow / share, c.underflow / share, c.amax * down)
    if (c.nonzero < 0).all():
        return (*basic, zeros, zeros - 1.0, zeros, zeros)
    some = c.nonzero > 0
    nonzero = np.where(some, c.nonzero, 1.0)
    mean = c.logs / nonzero
    deviation = np.sqrt(np.maximum(c.squared_logs / nonzero - mean * mean, 0.0))
    rms = np.sqrt(c.squares / share) * np.ldexp(1.0, -c.moments_exp.astype(np.int64))
    moments = (rms, c.nonzero / share, mean - c.moments_exp * math.log(2), deviation)
    unmeasured = (0.0, -1.0, 0.0, 0.0)
    return (
        *basic,
        *(np.where(some, x, np.where(c.nonzero < 0, u, 0.0)) for x, u in zip(moments, unmeasured, strict=True)),
    )


def count(x: Tensor, stored: Tensor, row: FormatRow[Scalar], dims: tuple[int, ...] = ()) -> list[Tensor]:
    """Return ``overflow`` to ``elements`` of float32 ``x``, whose scaled values are ``stored``, as float64.

    Counts cover the whole tensor, or each part that reducing ``dims`` leaves; `total` adds the parts.
    """
    magnitude = stored.view(torch.int32) & MAGNITUDE
    over, under = lost(magnitude, row)
    elements = magnitude >= 0  # all elements, since a trace does not know the shape
    numbers = [_sum(over, dims), _sum(under, dims), torch.amax(torch.abs(x), dims), _sum(elements, dims)]
    return [n.to(torch.float64) for n in numbers]


def count_moments(stored: Tensor, dims: tuple[int, ...] = ()) -> list[Tensor]:
    """Return ``nonzero`` to ``squared_logs`` of float32 ``stored`` as float64, by parts as `count` does.

    Stored values are near 1, so their squares neither over- nor underflow.
    """
    nonzero = (stored.view(torch.int32) & MAGNITUDE) > 0
    logs = torch.where(nonzero, torch.log(torch.where(nonzero, torch.abs(stored), 1.0)), 0.0)
    sums = [torch.sum(stored * stored, dims), torch.sum(logs, dims), torch.sum(logs * logs, dims)]
    return [n.to(torch.float64) for n in (_sum(nonzero, dims), *sums)]


CARRIED = len(FormatRow._fields)
"""Column of the scale table: the scale exponent that the input of a row's cast already carries."""
MEASURE = CARRIED + 1
"""Column of the scale table: 1 in steps that measure moments and histograms."""
SHORT_BITS = 15
SHORT = 1 << SHORT_BITS
"""Number of elements. Shorter parts count overflow and, in the bits above it, underflow in one 32-bit sum."""


def count_parts(
    x: Tensor,
    stored: Tensor,
    row: FormatRow[Scalar],
    dims: tuple[int, ...],
    measured: bool,
    short: bool = False,
    ln: Callable[[Tensor], Tensor] = torch.log,
) -> tuple[Tensor, ...]:
    """Count each part of float32 ``x``, whose scaled values are ``stored``; reducing ``dims`` leaves the parts.

    ``short`` parts have fewer than `SHORT` elements: overflow and underflow are one sum.

    Returns for each part, int32, the bits of the largest magnitude, overflow, and underflow if not ``short``. If
    ``measured``, also non-zero elements, and as float32 the sums of squares, of logarithms and of their squares.
    """
    magnitude = stored.view(torch.int32) & MAGNITUDE
    over, under = (flags.to(torch.int32) for flags in lost(magnitude, row))
    counted = [over + under * SHORT] if short else [over, under]
    if measured:
        counted.append(magnitude > 0)
    found = [torch.amax(x.view(torch.int32) & MAGNITUDE, dims)]
    found += [torch.sum(number, dims, dtype=torch.int32) for number in counted]
    if measured:
        logs = torch.where(magnitude > 0, ln(torch.where(magnitude > 0, torch.abs(stored), 1.0)), 0.0)
        found += [torch.sum(part, dims) for part in (stored * stored, logs, logs * logs)]
    return tuple(found)


class PartsOf(NamedTuple):
    """Place of the numbers of a site's parts in the tensors of `totals`, and what they count."""

    row: int
    """Row of the scale table."""
    start: int
    """First of the site's counts, in the last dimension."""
    size: int
    """Number of parts."""
    moments: int
    """First of the site's moments, or -1."""
    scaled: int
    """1 where the moments are those of scaled values."""
    elements: int
    short: int
    """1 where overflow and underflow are one sum."""


def parts_of(
    rows: Sequence[int],
    sizes: Sequence[int],
    elements: Sequence[int],
    measured: Sequence[bool],
    scaled: Sequence[bool],
    short: Sequence[bool],
) -> tuple[PartsOf, ...]:
    """Return where the numbers of several sites are that are side by side."""
    found: list[PartsOf] = []
    start = moments = 0
    for row, size, number, has_moments, is_scaled, is_short in zip(
        rows, sizes, elements, measured, scaled, short, strict=True
    ):
        first_moment = moments if has_moments else -1
        found.append(PartsOf(row, start, size, first_moment, int(is_scaled), number, int(is_short)))
        start += size * (3 - is_short + has_moments)
        moments += size * 3 * has_moments
    return tuple(found)


def totals(counts: Tensor, moments: Tensor, table: Tensor, sites: Sequence[PartsOf]) -> Tensor:
    """Add up what `count_parts` counted of several sites, side by side: `Counts`, (sites, `WIDTH`).

    ``counts`` (..., numbers) int32 and ``moments`` (..., numbers) float32 have each site's numbers one after the other.
    """
    return torch.stack([_totals_of(site, counts, moments, table) for site in sites])


def _totals_of(site: PartsOf, counts: Tensor, moments: Tensor, table: Tensor) -> Tensor:
    largest, *lost = counts[..., site.start :].split(site.size, -1)[:4]
    if site.short:
        lost[:1] = [lost[0] & (SHORT - 1), lost[0] >> SHORT_BITS]
    over, under, *rest = (number.sum(dtype=torch.int64).to(torch.float64) for number in lost)
    scale, carried, asked = (table[site.row, column].to(torch.float64) for column in (0, CARRIED, MEASURE))
    found = [over * 0 + n for n in UNMEASURED]
    if site.moments >= 0:
        mine = moments[..., site.moments :].split(site.size, -1)[:3]
        sums = [rest[0], *(part.to(torch.float64).sum() for part in mine)]
        found = [torch.where(asked > 0, n, u) for n, u in zip(sums, found, strict=True)]
    amax = largest.max().view(torch.float32).to(torch.float64)
    exponent = carried + scale if site.scaled else carried
    return torch.stack([over, under, amax, over * 0 + site.elements, *found, carried, exponent])


def _sum(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return torch.sum(x, dims, dtype=torch.int64)


def total(parts: list[Tensor]) -> Tensor:
    """Combine the parts of the first fields of `Counts`, in one reduction for all of them: (fields,) float64."""
    table = torch.cat([part.view(1, -1) for part in parts])
    is_amax = torch.arange(len(parts), device=table.device) == Counts._fields.index("amax")
    return torch.where(is_amax, torch.amax(table, 1), torch.sum(table, 1))


# Striped counters: each stripe has these int32 columns. After the stripes comes a row of facts, written by one program.
SUMS = 4  # column of the three float64 sums
STRIPES = 32
"""Copies of a site's counters; each program adds to one copy, since atomics on one address are serialised."""
COLUMNS = 10
"""Overflow, underflow, amax (float32 bits), non-zero, then as float64 the sums of squares, logs and squared logs.
The row of facts: elements (int64), carried exponent, scale exponent, whether moments were measured."""
SITE_COUNTERS = (STRIPES + 1) * COLUMNS


DEVICE_SOURCE = f'''@triton.jit
def largest_bits(x, inside):
    """Return the bits of the largest magnitude, of NaN where there is one; ``inside`` None: all outside is 0."""
    wide = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if inside is not None:
        wide = tl.where(inside, wide, 0)
    return tl.max(tl.ravel(wide), 0)


@triton.jit
def count_lost(largest, stored, inside, factor, counters, over_from, under_to):
    """Count what rounding ``stored`` loses, ``factor`` times what has the ``largest_bits``: an atomic for each number.

    ``inside`` is None where all outside of a tensor is 0. Overflow is looked for where the largest overflows.
    """
    bits = stored.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if inside is not None:
        bits = tl.where(inside, bits, 0)
    at = counters + (tl.program_id(0) % {STRIPES}) * {COLUMNS}
    short = tl.where((bits - 1).to(tl.uint32, bitcast=True) < under_to, 1, 0)
    tl.atomic_add(at + 1, tl.sum(tl.ravel(short)), sem="relaxed")
    tl.atomic_max(at + 2, largest, sem="relaxed")
    top = largest.to(tl.float32, bitcast=True) * factor
    if (top.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= over_from:
        tl.atomic_add(at, tl.sum(tl.ravel(tl.where(bits >= over_from, 1, 0))), sem="relaxed")


@triton.jit
def count_moments(stored, inside, counters):
    """Add a tile's moments."""
    at = counters + (tl.program_id(0) % {STRIPES}) * {COLUMNS}
    sums = (at + {SUMS}).to(tl.pointer_type(tl.float64))
    some = inside & (tl.abs(stored) > 0.0)
    known = tl.where(inside, stored, 0.0)
    logs = tl.where(some, tl.log(tl.where(some, tl.abs(stored), 1.0)), 0.0)
    tl.atomic_add(at + 3, tl.sum(tl.ravel(tl.where(some, 1, 0))), sem="relaxed")
    tl.atomic_add(sums, tl.sum(tl.ravel(known * known)).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(tl.ravel(logs)).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums + 2, tl.sum(tl.ravel(logs * logs)).to(tl.float64), sem="relaxed")


@triton.jit
def note_facts(counters, elements, carried, scale_exponent, measured):
    """Write, once a kernel, what the counts are of."""
    if tl.program_id(0) == 0:
        facts = counters + {STRIPES * COLUMNS}
        tl.store(facts.to(tl.pointer_type(tl.int64)), tl.cast(elements, tl.int64))
        tl.store(facts + 2, carried)
        tl.store(facts + 3, scale_exponent)
        tl.store(facts + 4, measured)
'''


@cache
def device_function(name: str) -> Any:
    """Return a function of `DEVICE_SOURCE`, for a kernel to call."""
    return compat.load_kernel(IMPORTS + DEVICE_SOURCE, name)


def gathered(counters: Tensor) -> Tensor:
    """Add up striped counters (sites * `SITE_COUNTERS`,) int32: rows of `Counts` (sites, `WIDTH`) float64."""
    table = counters.view(-1, STRIPES + 1, COLUMNS)
    stripes, facts = table[:, :STRIPES], table[:, STRIPES]
    lost, measured = torch.sum(stripes[:, :, :2], 1, dtype=torch.int64).to(torch.float64), facts[:, 4:5] != 0
    amax = torch.amax(stripes[:, :, 2], 1).view(torch.float32).to(torch.float64).unsqueeze(1)
    elements = facts[:, :2].contiguous().view(torch.int64).to(torch.float64)
    nonzero = torch.sum(stripes[:, :, 3], 1, dtype=torch.int64).to(torch.float64).unsqueeze(1)
    sums = torch.sum(stripes[:, :, SUMS:].contiguous().view(torch.float64), 1)
    moments = [torch.where(measured, nonzero, -1.0), torch.where(measured, sums, 0.0)]
    exponents = [facts[:, 2:3], facts[:, 2:3] + facts[:, 3:4]]
    return torch.cat([lost, amax, elements, *moments, *(e.to(torch.float64) for e in exponents)], 1)
