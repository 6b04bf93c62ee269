"""Plain torch with what it saves for backward rounded to e4m3fn: what the format by itself makes of a model's gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def save_in_e4m3fn(module: nn.Module) -> None:
    """Make the module round the activations that it saves. Parameters and single numbers stay as they are."""
    kept = {p.untyped_storage().data_ptr() for p in module.parameters()}
    forward = module.forward

    def pack(t: Tensor) -> Tensor:
        is_kept = t.dtype != torch.float32 or t.numel() < 2 or t.untyped_storage().data_ptr() in kept
        return t if is_kept else rounded(t)

    def saving_rounded(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return forward(*args, **kwargs)

    module.forward = saving_rounded  # type: ignore[method-assign]


def rounded(t: Tensor) -> Tensor:
    """Round to e4m3fn with the largest power of two as scale that keeps all elements within its range."""
    amax = float(t.abs().max())
    scale = 2.0 ** math.floor(math.log2(LARGEST / amax)) if 0 < amax < math.inf else 1.0
    return (t.detach() * scale).to(torch.float8_e4m3fn).to(t.dtype) / scale
