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

from fxprec.runtime.aps import kernels
from fxprec.runtime.aps.kernels import MAX_FACTOR_EXPONENT

BLOCK = 1024
"""Elements per program of the GPU kernels of `segments_triton`."""

ZERO_LAYER = -128
NON_FINITE_LAYER = 127
EXPONENT_BIAS = 12


def largest_magnitudes(layers: list[Tensor]) -> Tensor:
    """Return the largest magnitude of each layer, float32 (layers,); 0 for an empty layer, NaN for one with a NaN."""
    device = layers[0].device if layers else torch.device("cpu")
    zero = torch.zeros((), dtype=torch.float32, device=device)
    if layers and all(v.dtype == torch.float32 for v in layers) and kernels.usable(*layers):
        return torch.tensor([kernels.largest_bits(v) for v in layers], dtype=torch.int32, device="cpu").view(
            torch.float32
        )
    found = [zero if v.numel() == 0 else torch.linalg.vector_norm(v, float("inf")).float() for v in layers]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float32, device=device)


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


def scale_by_powers(pieces: list[Tensor], exponents: Tensor, mask: Tensor | None = None) -> None:
    """Multiply each piece (float32) in place by 2^exponent, exactly while the results are normal, and by `mask`.

    Exponents beyond 126 in magnitude take two multiplications.
    """
    if not pieces:
        return
    first = exponents.clamp(-MAX_FACTOR_EXPONENT, MAX_FACTOR_EXPONENT)
    second = exponents - first
    factor = power_of_two(first)
    _multiply(pieces, factor if mask is None else factor * mask)
    if bool(second.any()):
        _multiply(pieces, power_of_two(second))


def _multiply(pieces: list[Tensor], factors: Tensor) -> None:
    for piece, value in zip(pieces, factors.tolist(), strict=True):
        if value != 1.0:
            piece.mul_(value)
