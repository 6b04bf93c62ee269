"""Implement ``fxprec::store_blocks`` and ``fxprec::load_blocks`` on CPUs."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from fxprec.kernels.casts import LoadBlocks, StoreBlocks
from fxprec.numerics import block_codec, native
from fxprec.numerics.block_cpp import c_blocks, with_blocks
from fxprec.numerics.blocks import find_blocks
from fxprec.numerics.memory import empty_huge


@cache
def _library() -> ctypes.CDLL:
    memory, end = ctypes.c_void_p, (ctypes.c_int64, ctypes.c_void_p)
    load = (None, memory, memory, *end, ctypes.c_float)
    signatures = {
        "fxprec_store_blocks": (None, memory, memory, *end, memory, ctypes.c_float),
        "fxprec_load_blocks32": load,
        "fxprec_load_blocks16": load,
    }
    return native.load(with_blocks(native.text_beside(__file__, "blocks.cpp")), signatures)


def store_blocks(
    x: torch.Tensor, seed: torch.Tensor | None, whole: torch.Tensor | None, row: int, format: str
) -> torch.Tensor:
    """Return the records of ``x``, with its elements in row-major order, (blocks, bytes) uint8."""
    fmt, count = find_blocks(format), x.numel()
    native.check_readable("x", x)
    x = x.to(torch.float32).contiguous().resolve_neg()
    blocks = -(-count // fmt.block)
    stored = empty_huge((blocks, fmt.head_bytes + fmt.code_bytes), torch.uint8)
    own_seed = None if seed is None else block_codec.salted(seed, row)
    seed_at = 0 if own_seed is None else native.address("seed", own_seed, torch.int32, 1)
    x_at = native.address("x", x, torch.float32, count)
    form = ctypes.addressof(c_blocks(fmt, stochastic=seed is not None))
    _library().fxprec_store_blocks(x_at, stored.data_ptr(), count, form, seed_at, _whole(whole))
    return stored


def load_blocks(
    q: torch.Tensor, whole: torch.Tensor | None, row: int, format: str, elements: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the first ``elements`` numbers of stored records, (elements,)."""
    fmt = find_blocks(format)
    size = -(-elements // fmt.block) * (fmt.head_bytes + fmt.code_bytes)
    at = native.address("q", q, torch.uint8, size)
    narrow = dtype == torch.bfloat16
    values = empty_huge((elements,), torch.bfloat16 if narrow else torch.float32)
    load = _library().fxprec_load_blocks16 if narrow else _library().fxprec_load_blocks32
    load(at, values.data_ptr(), elements, ctypes.addressof(c_blocks(fmt, stochastic=False)), _whole(whole))
    return values if values.dtype == dtype else values.to(dtype)


def _whole(scale: torch.Tensor | None) -> float:
    return 1.0 if scale is None else float(scale)


StoreBlocks.implement(store_blocks, "CPU")
LoadBlocks.implement(load_blocks, "CPU")
