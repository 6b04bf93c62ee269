"""Add up the counts that a graph's kernels left for each part of a tensor, and the counts in striped counters.

A cast has up to hundreds of thousands of parts. ``SPLITS`` programs add up a share of the parts each, then one program
adds up the shares. Floats are not added by atomics, so the same parts give the same bits in every run.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxprec.numerics.stats import (
    CARRIED,
    COLUMNS,
    MEASURE,
    SHORT_BITS,
    SITE_COUNTERS,
    STRIPES,
    SUMS,
    WIDTH,
    PartsOf,
)
from fxprec.runtime.gemm.launch import enqueue

BLOCK, WARPS = 1024, 8
NUMBERS = 7
"""Numbers in a share: overflow, underflow, bits of amax, non-zero, sums of squares, logarithms, squared logarithms."""
MOST_SPLITS = 128


@triton.jit
def shares_kernel(
    counts_ptr: tl.tensor,
    moments_ptr: tl.tensor,
    share_ptr: tl.tensor,
    pitch: tl.tensor,
    moments_pitch: tl.tensor,
    outer: tl.tensor,
    FACTS: tl.constexpr,
    SHORT_BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add up one share of a site's parts."""
    site, share = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    start, size, moments, short = 0, 0, -1, 0
    for k in tl.static_range(len(FACTS)):
        start = tl.where(site == k, FACTS[k][1], start)
        size = tl.where(site == k, FACTS[k][2], size)
        moments = tl.where(site == k, FACTS[k][3], moments)
        short = tl.where(site == k, FACTS[k][6], short)
    over = tl.zeros((BLOCK,), tl.int64)
    under = tl.zeros((BLOCK,), tl.int64)
    nonzero = tl.zeros((BLOCK,), tl.int64)
    amax = tl.zeros((BLOCK,), tl.int32)
    squares = tl.zeros((BLOCK,), tl.float64)
    logs = tl.zeros((BLOCK,), tl.float64)
    squared_logs = tl.zeros((BLOCK,), tl.float64)
    for first in range(share * BLOCK, outer * size, SPLITS * BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < outer * size
        above, i = i // size, i % size
        at = counts_ptr + above * pitch + start + i
        amax = tl.maximum(amax, tl.load(at, mask=inside, other=0))
        lost = tl.load(at + size, mask=inside, other=0)
        if short != 0:
            over += lost & ((1 << SHORT_BITS) - 1)
            under += lost >> SHORT_BITS
        else:
            over += lost
            under += tl.load(at + 2 * size, mask=inside, other=0)
        if moments >= 0:
            nonzero += tl.load(at + (3 - short) * size, mask=inside, other=0)
            at_moments = moments_ptr + above * moments_pitch + moments + i
            squares += tl.load(at_moments, mask=inside, other=0.0).to(tl.float64)
            logs += tl.load(at_moments + size, mask=inside, other=0.0).to(tl.float64)
            squared_logs += tl.load(at_moments + 2 * size, mask=inside, other=0.0).to(tl.float64)
    out = share_ptr + tl.program_id(0) * NUMBERS
    tl.store(out, tl.sum(over).to(tl.float64))
    tl.store(out + 1, tl.sum(under).to(tl.float64))
    tl.store(out + 2, tl.max(amax, 0).to(tl.float64))
    tl.store(out + 3, tl.sum(nonzero).to(tl.float64))
    tl.store(out + 4, tl.sum(squares))
    tl.store(out + 5, tl.sum(logs))
    tl.store(out + 6, tl.sum(squared_logs))


@triton.jit
def totals_kernel(
    share_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    FACTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CARRIED: tl.constexpr,
    MEASURE: tl.constexpr,
    WIDTH: tl.constexpr,
    NUMBERS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Add up a site's shares, and write its row of `fxprec.numerics.stats.Counts`."""
    site = tl.program_id(0)
    row, moments, scaled = 0, -1, 0
    elements = tl.full((), 0, tl.int64)
    for k in tl.static_range(len(FACTS)):
        row = tl.where(site == k, FACTS[k][0], row)
        moments = tl.where(site == k, FACTS[k][3], moments)
        scaled = tl.where(site == k, FACTS[k][4], scaled)
        elements = tl.where(site == k, FACTS[k][5], elements)
    at = share_ptr + (site * SPLITS + tl.arange(0, SPLITS)) * NUMBERS
    carried = tl.load(table_ptr + row * COLUMNS + CARRIED)
    own = tl.load(table_ptr + row * COLUMNS)
    measured = (moments >= 0) & (tl.load(table_ptr + row * COLUMNS + MEASURE) != 0)
    out = out_ptr + site * WIDTH
    tl.store(out, tl.sum(tl.load(at)))
    tl.store(out + 1, tl.sum(tl.load(at + 1)))
    amax = tl.max(tl.load(at + 2), 0).to(tl.int32)
    tl.store(out + 2, amax.to(tl.float32, bitcast=True).to(tl.float64))
    tl.store(out + 3, elements.to(tl.float64))
    tl.store(out + 4, tl.where(measured, tl.sum(tl.load(at + 3)), -1.0))
    for k in tl.static_range(3):
        tl.store(out + 5 + k, tl.where(measured, tl.sum(tl.load(at + 4 + k)), 0.0))
    tl.store(out + 8, carried.to(tl.float64))
    tl.store(out + 9, (carried + tl.where(scaled != 0, own, 0)).to(tl.float64))


@lru_cache(maxsize=1024)
def flags(sites: tuple[PartsOf, ...], columns: int) -> dict[str, object]:
    """Return the compile-time arguments that both kernels share; the table of scales has ``columns``."""
    return {"FACTS": tuple(tuple(site) for site in sites), "COLUMNS": columns}


def shares_flags(constants: dict[str, object], splits: int) -> dict[str, object]:
    """Return the compile-time arguments of `shares_kernel`."""
    return {
        "FACTS": constants["FACTS"],
        "SHORT_BITS": SHORT_BITS,
        "NUMBERS": NUMBERS,
        "SPLITS": splits,
        "BLOCK": BLOCK,
    }


def totals_flags(constants: dict[str, object], splits: int) -> dict[str, object]:
    """Return the compile-time arguments of `totals_kernel`."""
    return {**constants, "CARRIED": CARRIED, "MEASURE": MEASURE, "WIDTH": WIDTH, "NUMBERS": NUMBERS, "SPLITS": splits}


def splits_of(parts: int) -> int:
    """Return the number of programs that share the parts of the largest site, a power of two."""
    return min(int(triton.next_power_of_2(triton.cdiv(parts, 2 * BLOCK))), MOST_SPLITS)


def totals(counts: Tensor, moments: Tensor, table: Tensor, sites: tuple[PartsOf, ...]) -> Tensor:
    """Return what `fxprec.numerics.stats.totals` returns: rows of counts, (sites, `WIDTH`) float64."""
    constants = flags(sites, table.shape[1])
    outer = counts.numel() // counts.shape[-1]
    splits = splits_of(outer * max(site.size for site in sites))
    out = torch.empty(len(sites), WIDTH, dtype=torch.float64, device=counts.device)
    shares = torch.empty(len(sites), splits, NUMBERS, dtype=torch.float64, device=counts.device)
    pitches = counts.shape[-1], moments.shape[-1], outer
    options = {**shares_flags(constants, splits), "num_warps": WARPS}
    enqueue(shares_kernel, (len(sites) * splits,), counts, moments, shares, *pitches, **options)
    enqueue(totals_kernel, (len(sites),), shares, table, out, **totals_flags(constants, splits), num_warps=1)
    return out


@triton.jit
def gather_kernel(
    counters_ptr: tl.tensor,
    out_ptr: tl.tensor,
    STRIPES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Add up a site's striped counters, and write its row of `fxprec.numerics.stats.Counts`."""
    mine = counters_ptr + tl.program_id(0) * (STRIPES + 1) * COLUMNS
    at = mine + tl.arange(0, STRIPES) * COLUMNS
    facts = mine + STRIPES * COLUMNS
    measured = tl.load(facts + 4) != 0
    carried = tl.load(facts + 2)
    out = out_ptr + tl.program_id(0) * WIDTH
    tl.store(out, tl.sum(tl.load(at).to(tl.int64)).to(tl.float64))
    tl.store(out + 1, tl.sum(tl.load(at + 1).to(tl.int64)).to(tl.float64))
    tl.store(out + 2, tl.max(tl.load(at + 2), 0).to(tl.float32, bitcast=True).to(tl.float64))
    tl.store(out + 3, tl.load(facts.to(tl.pointer_type(tl.int64))).to(tl.float64))
    tl.store(out + 4, tl.where(measured, tl.sum(tl.load(at + 3).to(tl.int64)), -1).to(tl.float64))
    for k in tl.static_range(3):
        part = tl.load((at + SUMS).to(tl.pointer_type(tl.float64)) + k)
        tl.store(out + 5 + k, tl.where(measured, tl.sum(part), 0.0))
    tl.store(out + 8, carried.to(tl.float64))
    tl.store(out + 9, (carried + tl.load(facts + 3)).to(tl.float64))


GATHER = {"STRIPES": STRIPES, "COLUMNS": COLUMNS, "SUMS": SUMS, "WIDTH": WIDTH}


def gathered(counters: Tensor) -> Tensor:
    """Add up striped counters as `fxprec.numerics.stats.gathered` does."""
    sites = counters.numel() // SITE_COUNTERS
    out = torch.empty(sites, WIDTH, dtype=torch.float64, device=counters.device)
    enqueue(gather_kernel, (sites,), counters, out, **GATHER, num_warps=1)
    return out
