"""Orthogonalise matrices, and adapt learning rates to their shapes, for Muon's step."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

AdjustRate: TypeAlias = Literal["original", "match_rms_adamw", "spectral_unclamped"]
QUINTIC = (3.4445, -4.775, 2.0315)
"""Coefficients a, b, c of x -> a x + b x^3 + c x^5, which steepens small singular values most (Jordan et al. 2024)."""


def orthogonalised(x: Tensor, quintic: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return a bfloat16 matrix with the singular vectors of ``x`` and singular values near 1; ``x`` is overwritten.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks": Newton-Schulz iterations.
    """
    a, b, c = quintic
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, gram, x, beta=a)
    return x.T if is_tall else x


def rate_of_shape(rule: str | None, rows: int, columns: int) -> float:
    """Return the factor of the learning rate for a matrix of this shape, as in torch.optim.Muon."""
    if not rows or not columns:
        return 1.0
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(ratio if rule == "spectral_unclamped" else max(1.0, ratio))
