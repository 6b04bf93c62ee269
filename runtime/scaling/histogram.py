"""Count exponents in histograms that give a tensor's exact under- and overflow rate at every power-of-two scale.

Scaling by 2**k changes only the exponent of a float32. The borders of the bins are a format's threshold times powers of
two, so the elements beyond the threshold at any scale fill whole bins. The thresholds of underflow and overflow have
different significands, so each has a row of 64 bins. The last bin has the largest magnitude; the first bin also has
everything smaller than 2**-63 of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from fxprec.ir.symbolic import HISTOGRAM_BINS
from fxprec.numerics import rows
from fxprec.numerics.formats import Format
from fxprec.numerics.rows import INFINITY, MAGNITUDE, float_bits, format_row

_EXPONENT = 23
_MANTISSA = (1 << _EXPONENT) - 1


def borders(fmt: Format) -> tuple[int, int]:
    """Return the float32 bits of the smallest magnitude that does not underflow and of the smallest that overflows."""
    limits = rows.thresholds(format_row(fmt))
    assert isinstance(limits.overflow, int)
    assert isinstance(limits.underflow, int)
    return limits.underflow + 1, limits.overflow


def count_exponents(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Count the finite, non-zero elements of ``x``: (128,) float64, 64 bins for underflow and 64 for overflow."""
    bits = x.detach().to(torch.float32).contiguous().view(torch.int32).flatten() & MAGNITUDE
    counted = (bits > 0) & (bits < INFINITY)
    rows = [_row(bits, counted, threshold & _MANTISSA) for threshold in borders(fmt)]
    return torch.cat(rows)


def _row(bits: torch.Tensor, counted: torch.Tensor, border: int) -> torch.Tensor:
    index = (bits - border) >> _EXPONENT
    empty = torch.zeros(HISTOGRAM_BINS, dtype=torch.float64, device=bits.device)
    if not index.numel():
        return empty
    top = torch.where(counted, index, -1).max()
    bins = (index - top + HISTOGRAM_BINS - 1).clamp(0, HISTOGRAM_BINS - 1).to(torch.int64)
    return empty.scatter_add_(0, bins, counted.to(torch.float64))  # float32 counts to 2^24


@dataclass(frozen=True)
class Histogram:
    """Counts of one tensor without its scale, by exponent from ``top - 63`` to ``top``."""

    under: Sequence[float]
    over: Sequence[float]
    under_top: int
    """Exponent of the largest magnitude, counted from the underflow threshold."""
    over_top: int

    @classmethod
    def of(cls, counts: Sequence[float], amax: float, fmt: Format) -> Self:
        """Make a histogram of `count_exponents`'s result; ``amax`` is the largest finite magnitude, without a scale."""
        tops = [_index(amax, t & _MANTISSA) - (t >> _EXPONENT) for t in borders(fmt)]
        return cls(tuple(counts[:HISTOGRAM_BINS]), tuple(counts[HISTOGRAM_BINS:]), *tops)

    def raised(self, binades: int) -> Self:
        """Return the histogram of the tensor times ``2**binades``."""
        return replace(self, under_top=self.under_top + binades, over_top=self.over_top + binades)

    def underflow(self, scale_exp: int) -> float:
        """Return the share of the non-zero elements that underflow at scale ``2**scale_exp``."""
        # A bin underflows if its exponent, counted from the threshold, is negative at that scale.
        below = -(self.under_top + scale_exp) + HISTOGRAM_BINS - 1
        return sum(self.under[: max(0, min(HISTOGRAM_BINS, below))]) / max(sum(self.under), 1.0)

    def overflow(self, scale_exp: int) -> float:
        """Return the share of the non-zero elements that overflow at scale ``2**scale_exp``."""
        first = -(self.over_top + scale_exp) + HISTOGRAM_BINS - 1
        return sum(self.over[max(0, min(HISTOGRAM_BINS, first)) :]) / max(sum(self.over), 1.0)

    def smallest_scale_exp(self, underflow: float) -> int:
        """Return the smallest exponent at which at most ``underflow`` of the non-zero elements underflow."""
        lost, total = 0.0, max(sum(self.under), 1.0)
        for i, count in enumerate(self.under):
            lost += count
            if lost > underflow * total:
                return HISTOGRAM_BINS - 1 - i - self.under_top
        return -self.under_top


def _index(magnitude: float, border: int) -> int:
    return (float_bits(magnitude) - border) >> _EXPONENT
