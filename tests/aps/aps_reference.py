"""The exchange as ALGORITHMS.md 5 defines it, on one rank that sees all gradients: slow, obvious, numpy and math."""

from __future__ import annotations

import math

import numpy as np
import torch

from fxprec.formats import Format
from fxprec.runtime.reference import reference_quantize


def rounded(x: np.ndarray, fmt: Format) -> np.ndarray:
    return reference_quantize(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)), fmt).float().numpy()


def ceil_log2(x: float) -> int:
    mantissa, exponent = math.frexp(x)
    return exponent - 1 if mantissa == 0.5 else exponent


def ldexp(x: np.ndarray, t: int) -> np.ndarray:
    """Exact in float64, then one rounding to float32."""
    return np.ldexp(x.astype(np.float64), t).astype(np.float32)


def shared_exponent(layer: list[np.ndarray], num_terms: int) -> int | None:
    largest = max(float(np.abs(g.astype(np.float64)).max()) for g in layer)
    return None if largest == 0 else min(138, max(-115, ceil_log2(largest * num_terms)))


def mean_of_layer(grads: list[np.ndarray], fmt: Format, top: int, owners: np.ndarray, mode: str) -> np.ndarray:
    """The mean gradient (elements,) of one layer's gradients by rank; `owners` (elements,) says who sums."""
    n = len(grads)
    if any(not np.isfinite(g).all() for g in grads):
        return np.full(grads[0].shape, np.nan, dtype=np.float32)
    shared = shared_exponent(grads, 1 if mode == "fp32" else n)
    if shared is None:
        return np.zeros(grads[0].shape, dtype=np.float32)
    t = top - shared
    sent = [rounded(ldexp(g, t), fmt) for g in grads]
    total = np.empty(grads[0].shape, dtype=np.float32)
    for owner in np.unique(owners):
        mask = owners == owner
        parts = [s[mask] for s in sent]
        total[mask] = _sum_fp32(parts, fmt, top) if mode == "fp32" else _sum_ring(parts, fmt, int(owner), mode)
    return ldexp(total, -t) / np.float32(n)


def _sum_fp32(parts: list[np.ndarray], fmt: Format, top: int) -> np.ndarray:
    total = parts[0].copy()
    for p in parts[1:]:
        total = (total + p).astype(np.float32)
    largest = float(np.abs(total).max())
    if largest == 0:
        return total
    t = top - ceil_log2(largest)
    return ldexp(rounded(ldexp(total, t), fmt), -t)


def _sum_ring(parts: list[np.ndarray], fmt: Format, owner: int, mode: str) -> np.ndarray:
    n = len(parts)
    order = [parts[(owner + 1 + k) % n] for k in range(n)]
    total, lost = order[0].copy(), np.zeros_like(order[0])
    for term in order[1:]:
        if mode == "format":
            total = rounded(total + term, fmt)
            continue
        y = rounded(term - lost, fmt)
        t = rounded(total + y, fmt)
        lost = rounded(rounded(t - total, fmt) - y, fmt)
        total = t
    return total
