"""The operator that torch chooses for attention on a GPU, in a graph that is traced on the CPU.

A torch without CUDA has no rule of a GPU's choice, so `kernel` follows torch's (``select_sdp_backend`` in
``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, of torch 2.13) for compute capability 8.0 and above.
"""

from __future__ import annotations

from functools import partial, update_wrapper
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from fxprec import compat

Kernel = Literal["cudnn", "flash", "efficient", "math"]
_PREFERS_CUDNN = (90, 100)
_LOW = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = {"cudnn": 128, "flash": 256}
aten = torch.ops.aten


def kernel(arch: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Kernel:
    """Return the kernel for these operands: (batch, heads, tokens, head size)."""
    low, sizes = q.dtype in _LOW, (q.shape[-1], v.shape[-1])
    if q.dim() != 4 or q.shape[-1] != k.shape[-1]:
        return "math"
    if low and arch in _PREFERS_CUDNN and all(s % 8 == 0 and s <= _LARGEST_HEAD["cudnn"] for s in sizes):
        return "cudnn"
    square = q.shape[-2] == k.shape[-2]
    same = sizes[0] == sizes[1] <= _LARGEST_HEAD["flash"]
    if low and mask is None and same and (square or not is_causal):
        return "flash"
    return "efficient" if all(s % (8 if low else 4) == 0 for s in sizes) else "math"


def _attention(
    arch: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    chosen = kernel(arch, query, key, value, attn_mask, is_causal)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    if chosen == "math":
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    if enable_gqa and chosen == "efficient":
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if chosen == "flash":
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        size = value.shape[-1]
        padded = (F.pad(x, (0, -size % 8)) if size % 8 else x for x in (query, key, value))
        found = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return found[..., :size] if size % 8 else found
    operator = {
        "cudnn": aten._scaled_dot_product_cudnn_attention,
        "efficient": aten._scaled_dot_product_efficient_attention,
    }[chosen]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return operator(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def choose_as_on_gpu(gm: GraphModule, arch: int) -> None:
    """Make attention of a Dynamo graph of CPU tensors trace to a GPU's operator. What is traced cannot run."""
    for name in compat.bodies_traced_in_place(gm.graph):
        choose_as_on_gpu(getattr(gm, name), arch)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in compat.ATTENTION:
            node.target = update_wrapper(partial(_attention, arch), _attention)
    gm.recompile()
