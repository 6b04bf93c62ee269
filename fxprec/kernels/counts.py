"""Counts of all casts of a graph, combined by one kernel."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, FakeCall, Flags, Sizes
from fxprec.numerics.stats import SITE_COUNTERS, WIDTH


class Totals(Call, op="totals", fake=lambda call: call.counts.new_empty(len(call.rows) * WIDTH, dtype=torch.float64)):
    """Add up the counts of the parts of several sites: rows of `numerics.stats.Counts`, one per site, float64.

    ``rows`` are the sites' rows of the table. The tensors have the sites' numbers side by side in the last dimension,
    as `numerics.stats.count_parts` returns them for ``sizes`` parts: ``counts`` int32, and ``moments`` float32 of the
    ``measured`` sites, whose sums are returned in steps that measure. The moments of ``scaled`` sites carry the site's
    scale exponent too. Overflow and underflow of ``short`` sites are one sum.
    """

    counts: Node
    moments: Node
    table: Node
    rows: Sizes
    sizes: Sizes
    elements: Sizes
    measured: Flags
    scaled: Flags
    short: Flags


def _gathered(call: FakeCall) -> object:
    sites = call.counters.shape[0] // SITE_COUNTERS
    return call.counters.new_empty(sites * WIDTH, dtype=torch.float64)


class Gathered(Call, op="gathered", fake=_gathered):
    """Add up striped counters of kernels (`fxprec.numerics.stats`): rows of counts, float64."""

    counters: Node


class Ln(Call, op="ln", fake=lambda call: torch.empty_like(call.x), tags=(torch.Tag.pointwise,)):
    """Take the natural logarithm of positive float32.

    A GPU uses its approximation, off by 2e-7 near 1 and by 2^-22 of the result elsewhere. It takes a third of the
    instructions of an exact logarithm and is accurate enough for statistics.
    """

    x: Node


GATHERED = Gathered.target
