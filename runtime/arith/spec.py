"""Specify a multiplication at chosen precision: formats, order of the sums, and which float32 results need care."""

from __future__ import annotations

from dataclasses import dataclass

from fxprec.errors import FormatError
from fxprec.numerics.formats import FP32, Format


@dataclass(frozen=True)
class Spec:
    """The precision of a multiplication: products in ``fmt``, sums in ``accumulate``, in increasing k, by chunks.

    Raises `FormatError` for a format of 22 mantissa bits, one bit short of float32, which carries the values.
    """

    fmt: Format
    accumulate: Format
    kahan: bool = False
    chunk: int = 0
    """Number of products that a partial sum takes before it is added to the total; 0: all of them."""

    def __post_init__(self) -> None:
        for fmt in (self.fmt, self.accumulate):
            if fmt.mantissa_bits == 22:
                raise FormatError(
                    f"{fmt.name} has one mantissa bit less than float32, which carries the values and would round "
                    "them twice; use at most 21 mantissa bits, or fp32"
                )

    @property
    def odd_product(self) -> bool:
        """Return whether a float32 product of numbers of ``fmt`` can be inexact, so that it must be rounded to odd."""
        if self.fmt == FP32:
            return False
        return self.fmt.mantissa_bits > 11 or self.fmt.smallest_subnormal**2 < 2.0**-149 or self.fmt.largest**2 > 3e38

    @property
    def odd_sum(self) -> bool:
        """Return whether rounding a float32 sum could round twice.

        It cannot under two conditions. Both addends have at most q significant bits, with 24 >= 2 q + 2 (Figueroa
        1995). The sum of two small addends is a multiple of the accumulator's smallest number.
        """
        if self.accumulate == FP32:
            return False
        bits = max(self.fmt.mantissa_bits, self.accumulate.mantissa_bits) + 1
        fits = self.fmt.mantissa_bits <= self.accumulate.mantissa_bits and bits <= 11
        return not (fits and self.fmt.smallest_subnormal >= self.accumulate.smallest_subnormal)
