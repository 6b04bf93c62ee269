"""Reserve a part of a GPU's ``peak_budget`` that no plan may use: libraries' workspaces, and an allowance."""

from __future__ import annotations

import math

import torch

from fxprec import compat
from fxprec.passes.analysis.gemm_costs import gpu_of

ALLOWANCE = 0.02
"""Share of a budget for cuDNN's workspaces, accumulators of attention's backward, and unsplit allocator blocks."""
_THREADS = 2  # forward's and backward's thread, each with a cuBLAS handle


def workspaces(device: torch.device) -> int:
    """Return the bytes of cuBLAS's workspaces on a device; 0 on a CPU."""
    gpu = gpu_of(device)
    return 0 if gpu is None else _THREADS * compat.cublas_workspace_bytes(gpu.capability)


def reserved(device: torch.device, budget: int) -> int:
    """Return the bytes of a budget that stay free."""
    return workspaces(device) + int(ALLOWANCE * budget) if device.type == "cuda" else 0


def enough_for(missing: int, budget: int) -> int:
    """Return the larger budget for one that lacks ``missing`` bytes; a share of the added bytes is reserved too."""
    return budget + math.ceil(missing / (1 - ALLOWANCE))
