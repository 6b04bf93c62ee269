"""Replacements for operators that torch cannot differentiate, written with operators that it can."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fxprec.compat import tree_map_only
from fxprec.ir.symbolic import Rotate
from fxprec.kernels.wide_gemms import WIDE
from fxprec.numerics.hadamard import rotated

aten, prims = torch.ops.aten, torch.ops.prims


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, (batch, heads, tokens, width), as flash attention computes them.

    Probabilities are computed from the saved logsumexp, the row sums from the saved result (Dao et al. 2022, Algorithm
    4). Raises `NotImplementedError` for dropout.
    """
    if dropout_p:
        raise NotImplementedError("the mask of attention's dropout is not saved")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = query @ key.mT * scale
    if attn_mask is not None:
        logits = logits + attn_mask
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
    probabilities = torch.exp(logits - logsumexp.unsqueeze(-1))
    inner = grad @ value.mT - (grad * out).sum(-1, keepdim=True)
    scores = probabilities * inner * scale
    return scores @ key, scores.mT @ query, probabilities.mT @ grad


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` as ``dtype``."""
    return x.to(dtype)


def in_float32(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for a 16-bit GEMM that computes in float32 and rounds, as `fxprec.kernels.wide_gemms`."""

    def run(*args: Any, **options: object) -> Tensor | tuple[Tensor | None, ...]:
        wide = tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, (args, options))
        results = operator(*wide[0], **wide[1])
        if isinstance(results, Tensor):
            return results.to(args[0].dtype)
        is_attention = operator is aten._scaled_dot_product_flash_attention_for_cpu.default
        kept = 1 if is_attention else len(results)  # logarithms of sums stay float32
        return tuple(None if x is None else x.to(args[0].dtype) if i < kept else x for i, x in enumerate(results))

    return run


def finite_exp(x: Tensor) -> Tensor:
    """Return exp(x), at most half of the dtype's largest number: x / (1 + exp(-x)) then has finite derivatives."""
    return torch.exp(x.clamp(max=math.log(torch.finfo(x.dtype).max / 2)))


_OWN: Mapping[object, Callable[..., object]] = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
    aten.exp.default: finite_exp,
    prims.convert_element_type.default: convert,
    Rotate.target: rotated,
}
SUBSTITUTES: Mapping[object, Callable[..., object]] = MappingProxyType(
    {**_OWN, **{wide: in_float32(_OWN.get(operator, operator)) for operator, wide in WIDE.items()}}
)
