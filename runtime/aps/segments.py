"""Find the largest magnitudes of layers side by side in a flat tensor, and multiply the layers by powers of two.

On a GPU each of the two is one launch for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fxprec.runtime import on_device
from fxprec.runtime.aps import kernels
from fxprec.runtime.aps.exponents import power_of_two
from fxprec.runtime.aps.kernels import MAX_FACTOR_EXPONENT

Bounds = Sequence[tuple[int, int]]
"""(start, end) of pieces of a flat tensor in elements, in order; a piece may be empty."""


def _on_gpu(flat: Tensor) -> bool:
    return flat.is_cuda


def largest_magnitudes(flat: Tensor, bounds: Bounds) -> Tensor:
    """Return the largest magnitude of each piece of a float32 tensor, float32 (pieces,).

    It is 0 for an empty piece, and NaN for one with a NaN.
    """
    if not bounds:
        return torch.zeros(0, dtype=torch.float32, device=flat.device)
    if _on_gpu(flat):
        from fxprec.runtime.aps import segments_triton

        return segments_triton.largest_magnitudes(flat, bounds)
    pieces = [flat[start:end] for start, end in bounds]
    if kernels.usable(flat):
        bits = [kernels.largest_bits(piece) for piece in pieces]
        return torch.tensor(bits, dtype=torch.int32, device="cpu").view(torch.float32)
    zero = torch.zeros((), dtype=torch.float32, device=flat.device)
    return torch.stack([torch.linalg.vector_norm(p, float("inf")) if p.numel() else zero for p in pieces])


def scale_by_powers(flat: Tensor, bounds: Bounds, exponents: Tensor, mask: Tensor | None = None) -> None:
    """Multiply each piece of a float32 tensor in place by 2^exponent and by `mask`, exactly while results are normal.

    Exponents beyond 126 in magnitude take two multiplications.
    """
    if not bounds:
        return
    if _on_gpu(flat):
        from fxprec.runtime.aps import segments_triton

        segments_triton.scale_by_powers(flat, bounds, exponents, mask)
        return
    first = exponents.clamp(-MAX_FACTOR_EXPONENT, MAX_FACTOR_EXPONENT)
    factor = power_of_two(first)
    _multiply(flat, bounds, factor if mask is None else factor * mask)
    second = exponents - first
    if bool(second.any()):
        _multiply(flat, bounds, power_of_two(second))


def _multiply(flat: Tensor, bounds: Bounds, factors: Tensor) -> None:
    for (start, end), value in zip(bounds, factors.tolist(), strict=True):
        if value != 1.0:
            flat[start:end].mul_(value)


@lru_cache(maxsize=1024)
def indices_of(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers as int64 on a device, uploaded once."""
    return on_device.uploaded_for_good(torch.tensor(values, dtype=torch.int64, device="cpu"), device)
