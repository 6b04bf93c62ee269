"""Memory on a GPU beyond a graph's tensors: the caching allocator's rounding, and cuBLAS's workspaces."""

from __future__ import annotations

import os
import re

import torch

_SMALL, _LARGE = 512, 2 << 20  # block sizes are multiples of these bytes (c10/cuda/CUDACachingAllocator)
_LARGEST_SHARED = 10 << 20  # requests below it share a segment
_HOPPER = (9, 0)
_DEFAULT_KIB = {False: 4096 * 2 + 16 * 8, True: 4096 * 8}  # before Hopper, from Hopper on (aten/cuda/CublasHandlePool)


def cuda_block_bytes(size: int) -> int:
    """Return the most bytes that the caching allocator takes for a tensor of ``size`` bytes."""
    unit = _SMALL if size < _LARGEST_SHARED else _LARGE
    return -(-size // unit) * unit


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of one cuBLAS handle's workspace: from torch, else from the environment, else torch's default.

    cuBLASLt uses the same memory.
    """
    ask = getattr(torch.backends.cuda, "cublas_workspace_size", None)  # from torch 2.12 on
    if ask is not None and torch.cuda.is_available():
        return int(ask())
    asked = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", asked)
    kib = sum(int(size) * int(count) for size, count in pairs) if pairs else _DEFAULT_KIB[capability >= _HOPPER]
    return kib << 10


def allocated(device: torch.device) -> tuple[int, int]:
    """Return the bytes in a GPU's allocated blocks now, and their maximum so far."""
    stats = torch.cuda.memory_stats(device)
    return int(stats.get("allocated_bytes.all.current", 0)), int(stats.get("allocated_bytes.all.peak", 0))
