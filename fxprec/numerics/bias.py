"""Measures whether a rounding is biased, by comparing its signed errors with those of an unbiased rounding.

Errors are counted in last places: the distance between a number's two neighbours in the format. Stochastic rounding of
a value that lies a share f above its lower neighbour has an error of mean 0 and variance f (1 - f). So for n values the
mean error of an unbiased rounding is within a few sqrt(sum f (1 - f)) / n of 0. Rounding toward zero is off by 1/2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fxprec.numerics import block_codec, codec
from fxprec.numerics.blocks import BlockFormat, Integer
from fxprec.numerics.formats import Format
from fxprec.numerics.rows import code_row, format_row

OFF = 0.25
"""Last places: half of the bias of rounding toward zero. Where the values' density falls as x^-a, rounding to nearest
in a format of m mantissa bits is off by at most a 2^-m / 12: 0.04 a in e2m1, 0.01 a in e4m3."""
SIGMAS = 6.0
"""Standard deviations of an unbiased rounding of the same values: 2 in 10^9 unbiased measurements lie beyond."""


@dataclass(frozen=True)
class Bias:
    """The mean error of a rounding over elements that are not exact in the format and neither under- nor overflow."""

    elements: int
    outward: float
    """Mean error away from zero, in last places; negative: toward zero. 0 for integers, which have an offset."""
    upward: float
    """Mean error toward +inf, in last places."""
    spread: float
    """Standard deviation that either mean would have if the same values were rounded stochastically."""

    @property
    def worst(self) -> float:
        """Return the mean error of larger magnitude."""
        return max(self.outward, self.upward, key=abs)

    @property
    def is_biased(self) -> bool:
        """Return whether the mean is far from 0: by `OFF` last places and by `SIGMAS` standard deviations."""
        return abs(self.worst) >= max(OFF, SIGMAS * self.spread)

    def __str__(self) -> str:
        names = ("away from zero", "toward zero") if self.worst == self.outward else ("up", "down")
        sigmas = abs(self.worst) / self.spread if self.spread else math.inf
        return (
            f"{abs(self.worst):.2g} of a last place {names[self.worst < 0]} on average, {sigmas:.3g} standard "
            f"deviations of an unbiased rounding of its {self.elements:,} inexact elements"
        )


NOTHING = Bias(0, 0.0, 0.0, 0.0)


def bias(x: Tensor, read: Tensor, fmt: Format | Integer) -> Bias:
    """Measure the rounding of ``x`` to ``read``, numbers of a format in the shape of ``x``, without scales."""
    wide, got = x.double().reshape(-1), read.double().reshape(-1)
    places = torch.ones_like(wide) if isinstance(fmt, Integer) else _places(wide, fmt)
    share = torch.frac(wide.abs() / places)
    inside = (share > 0) & _is_inside(wide, fmt) & got.isfinite()
    share, error = share[inside], ((got - wide) / places)[inside]
    if not share.numel():
        return NOTHING
    signed = error * (0.0 if isinstance(fmt, Integer) else wide[inside].sign())
    spread = math.sqrt(float((share * (1 - share)).sum())) / share.numel()
    return Bias(share.numel(), float(signed.mean()), float(error.mean()), spread)


def block_bias(x: Tensor, records: Tensor, fmt: BlockFormat, whole: Tensor | None) -> Bias:
    """Measure the rounding of ``x`` to `block_codec.records`; ``whole`` is the tensor's scale, if there is one."""
    encoded = block_codec.from_records(records, fmt)
    read = block_codec.decode(encoded, fmt, x.numel(), whole).double()
    scales, offsets = (_per_element(end, fmt, x.numel()) for end in _heads(encoded, fmt, whole))
    return bias((x.double().reshape(-1) - offsets) / scales, (read - offsets) / scales, fmt.element)


def _places(x: Tensor, fmt: Format) -> Tensor:
    """Return the distance between each element's two neighbours in the format."""
    exponents = (torch.frexp(x)[1] - 1).clamp_min(fmt.min_exponent)
    return torch.ldexp(torch.ones_like(x), exponents - fmt.mantissa_bits)


def _is_inside(x: Tensor, fmt: Format | Integer) -> Tensor:
    """Return which elements neither over- nor underflow; those losses are counted elsewhere.

    The choice depends on ``x`` alone: among elements chosen by their rounded values, no rounding is unbiased.
    """
    if isinstance(fmt, Integer):
        return (x >= 0) & (x <= fmt.largest)
    return (x.abs() >= fmt.smallest_subnormal) & (x.abs() <= fmt.largest)


def _heads(encoded: block_codec.Encoded, fmt: BlockFormat, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return each block's scale and offset, (blocks, 1) float64."""
    if fmt.has_power_scale:
        scale = torch.ldexp(torch.ones_like(encoded.scales, dtype=torch.float64), encoded.scales - 127)
    else:
        form = block_codec.scale_format(fmt)
        scale = codec.numbers(encoded.scales, format_row(form), code_row(form)).double()
    scale = scale if whole is None else scale * whole.double()
    if encoded.offsets is None:
        return scale, torch.zeros_like(scale)
    return scale, (encoded.offsets << 16).view(torch.float32).double()


def _per_element(head: Tensor, fmt: BlockFormat, elements: int) -> Tensor:
    return head.expand(-1, fmt.block).reshape(-1)[:elements]
