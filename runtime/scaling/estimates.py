"""Predict how much of a gradient a scale saves from underflow, by the model of Zhao et al. 2020, section 3.

``threshold`` is the magnitude up to which a value rounds to zero. The paper takes the smallest subnormal. With rounding
to nearest it is half of that, and predictions match measurements only with that half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from fxprec.numerics.formats import Format

_STANDARD = NormalDist()
_NO_SPREAD = 1e-6  # least deviation of ln|g|, taken for equal values


class Distribution(Protocol):
    """The distribution of a gradient's magnitudes without a scale.

    ``scale_exp`` is the k of a scale 2**k; shares are of the non-zero elements.
    """

    def underflow(self, scale_exp: int) -> float:
        """Return the share that rounds to zero."""

    def overflow(self, scale_exp: int) -> float:
        """Return the share that rounds beyond the largest number."""

    def smallest_scale_exp(self, underflow: float) -> int:
        """Return the smallest exponent at which at most ``underflow`` of the elements round to zero."""


def underflow_threshold(fmt: Format) -> float:
    """Return the largest magnitude that rounds to zero."""
    return fmt.smallest_subnormal / 2


def overflow_threshold(fmt: Format) -> float:
    """Return the smallest magnitude that overflows: the largest number plus half a unit in its last place."""
    return fmt.largest + 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)


def gemm_deviation(length: int, gradient: float, operand: float) -> float:
    """Return the standard deviation of a GEMM's results (Lemma 1, equation 2).

    ``length`` products are summed; ``gradient`` and ``operand`` are the root mean squares of the two factors. Both are
    taken over all elements, zeros included, so they already account for the N/2 of a ReLU before the GEMM.
    """
    return math.sqrt(length) * gradient * operand


def normal_underflow(deviation: float, threshold: float, scale: float = 1.0) -> float:
    """Return the share of a zero-mean normal that rounds to zero at ``scale`` (theorem 1, equation 3)."""
    return math.erf(threshold / (scale * math.sqrt(2) * deviation))


def normal_scale(deviation: float, threshold: float, underflow: float) -> float:
    """Return the scale at which Theorem 1 gives ``underflow``."""
    return threshold / (deviation * _STANDARD.inv_cdf((1 + underflow) / 2))


def log_normal_underflow(mean_ln: float, std_ln: float, threshold: float, scale: float = 1.0) -> float:
    """Return the share of a log-normal that rounds to zero at ``scale`` (theorem 2, equation 4)."""
    return _STANDARD.cdf((math.log(threshold) - mean_ln - math.log(scale)) / max(std_ln, _NO_SPREAD))


def log_normal_scale(mean_ln: float, std_ln: float, threshold: float, underflow: float) -> float:
    """Return the scale at which Theorem 2 gives ``underflow``."""
    return math.exp(math.log(threshold) - mean_ln - max(std_ln, _NO_SPREAD) * _STANDARD.inv_cdf(underflow))


@dataclass(frozen=True, slots=True)
class Normal(Distribution):
    """Zero-mean normal: the result of a GEMM, or a gradient without a better model."""

    deviation: float
    fmt: Format

    def underflow(self, scale_exp: int) -> float:
        return normal_underflow(self.deviation, underflow_threshold(self.fmt), 2.0**scale_exp)

    def overflow(self, scale_exp: int) -> float:
        return math.erfc(overflow_threshold(self.fmt) / (2.0**scale_exp * math.sqrt(2) * self.deviation))

    def smallest_scale_exp(self, underflow: float) -> int:
        return ceil_log2(normal_scale(self.deviation, underflow_threshold(self.fmt), underflow))


@dataclass(frozen=True, slots=True)
class LogNormal(Distribution):
    """Log-normal magnitudes: the gradient behind a softmax. ``mean_ln`` and ``std_ln`` are those of ln|g|."""

    mean_ln: float
    std_ln: float
    fmt: Format

    def underflow(self, scale_exp: int) -> float:
        return log_normal_underflow(self.mean_ln, self.std_ln, underflow_threshold(self.fmt), 2.0**scale_exp)

    def overflow(self, scale_exp: int) -> float:
        return 1.0 - log_normal_underflow(self.mean_ln, self.std_ln, overflow_threshold(self.fmt), 2.0**scale_exp)

    def smallest_scale_exp(self, underflow: float) -> int:
        return ceil_log2(log_normal_scale(self.mean_ln, self.std_ln, underflow_threshold(self.fmt), underflow))


def ceil_log2(value: float) -> int:
    """Return the smallest k with ``value <= 2**k``, exactly."""
    mantissa, exponent = math.frexp(value)
    return exponent - (mantissa == 0.5)


def floor_log2(value: float) -> int:
    """Return the largest k with ``2**k <= value``, exactly."""
    return math.frexp(value)[1] - 1
