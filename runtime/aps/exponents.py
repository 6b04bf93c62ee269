"""Convert per-layer exponents to one int8 vector, and that vector to power-of-two factors.

Definitions: docs/algorithms.md, "Communication in 8 bits". Exponents are integers from frexp, never from float32 log2.
E is the exponent of the smallest power of two not below the layer's largest magnitude. It is sent as E - 12, clamped to
-127..126, so E from -115 to 138 is exact. That covers every float32 up to 2^128 on 1024 ranks. A layer below 2^-115 is
scaled as if it reached 2^-115. -128 means that all elements are zero, 127 that one is inf or NaN: in an all-reduce with
MAX, any rank's 127 wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

ZERO_LAYER = -128
NON_FINITE_LAYER = 127
EXPONENT_BIAS = 12


def ceil_log2(magnitudes: Tensor) -> Tensor:
    """Return the exact ceil(log2(x)) as int32, for positive finite float64 values."""
    mantissa, exponent = torch.frexp(magnitudes)
    return exponent.to(torch.int32) - (mantissa == 0.5).to(torch.int32)


def exponent_codes(magnitudes: Tensor, num_terms: int = 1) -> Tensor:
    """Return the int8 vector to all-reduce with MAX, for sums of `num_terms` values of these magnitudes (layers,)."""
    wide = magnitudes.double() * num_terms
    finite = torch.isfinite(wide)
    code = (ceil_log2(torch.where(finite, wide, 1.0)) - EXPONENT_BIAS).clamp(-127, 126)
    code = torch.where(wide == 0, ZERO_LAYER, code)
    return torch.where(finite, code, NON_FINITE_LAYER).to(torch.int8)


def factor_exponents(codes: Tensor, top: int) -> Tensor:
    """Return t = top - E per layer (int32), 0 for sentinels; 2^t brings the largest value to `top` at most."""
    code = codes.to(torch.int32)
    sentinel = (code == ZERO_LAYER) | (code == NON_FINITE_LAYER)
    return torch.where(sentinel, 0, top - EXPONENT_BIAS - code)


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^k as float32 for int32 k in -126..127."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


def mask_factors(codes: Tensor) -> Tensor:
    """Return the factor of each decoded layer beside its scale: 0 for zeros, NaN for a non-finite layer, else 1."""
    ones = torch.ones(codes.shape, dtype=torch.float32, device=codes.device)
    ones = torch.where(codes == ZERO_LAYER, 0.0, ones)
    return torch.where(codes == NON_FINITE_LAYER, torch.nan, ones)
