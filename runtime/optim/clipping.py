"""Clip gradients by their global norm: that of this step, or of the last step if backward steps parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxprec.runtime.optim.rule import LAST

_CHUNK = 1 << 16  # elements; on CPUs a float32 norm of a bfloat16 tensor makes a float32 copy of what it reads


class Clipping:
    """The norms known so far of one step's gradients, from which the factor of each gradient follows.

    With norm="exact" the factor is that of `torch.nn.utils.clip_grad_norm_`. With norm="last" this step's norm is not
    known yet. The last step's norm replaces it, or the gradient's own norm if that is larger.
    """

    def __init__(self) -> None:
        self._norms: dict[Tensor, Tensor] = {}

    def see(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Compute and keep the norms of these parameters' gradients."""
        self._norms |= zip(params, norms_of(gradients), strict=True)

    def factors(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> Tensor:
        """Return the factor of each parameter's gradient, float32 (parameters,), on the device of the norms."""
        own = torch.stack([self._norms[param] for param in params])
        if group["norm"] != LAST:
            norms = _total(list(self._norms.values())).to(own.device).expand_as(own)
        elif group["last_norm"] is None:
            norms = own
        else:
            norms = torch.maximum(own, group["last_norm"].to(own.device))
        return torch.clamp(group["max_norm"] / (norms + 1e-6), max=1.0)

    def finish(self, groups: list[dict[str, Any]]) -> None:
        """Keep the norm of the finished step in the param groups. It is summed in the parameters' order."""
        norms = [self._norms[p] for group in groups for p in group["params"] if p in self._norms]
        self._norms.clear()
        if norms:
            total = _total(norms)
            for group in groups:
                group["last_norm"] = total


def norms_of(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the float32 2-norm of each gradient; of a sharded gradient, the norm over all ranks."""
    if any(isinstance(g, DTensor) or g.device.type == "cpu" for g in gradients):
        return [_of_one(g) for g in gradients]
    return torch._foreach_norm(list(gradients), 2, torch.float32) if gradients else ()


def _of_one(gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor):
        found = _norm(gradient)
        return found.full_tensor() if isinstance(found, DTensor) else found
    if gradient.dtype == torch.float32 or gradient.numel() <= _CHUNK:
        return _norm(gradient)
    rows = gradient.view(-1) if gradient.is_contiguous() else gradient
    return _total([_norm(part) for part in rows.split(max(1, _CHUNK * len(rows) // rows.numel()))])


def _total(norms: Sequence[Tensor]) -> Tensor:
    return _norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def _norm(t: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(t, dtype=torch.float32)
    return found
