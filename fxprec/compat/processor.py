"""Read the CPU's capabilities from torch."""

from __future__ import annotations

import torch


def cpu_vectors() -> str:
    """Return the instruction set of torch's CPU kernels, such as ``"avx512"``; `ATEN_CPU_CAPABILITY` can lower it."""
    return torch.backends.cpu.get_cpu_capability().lower()


def has_cpu_gemm(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has instructions for GEMMs of a 16-bit dtype; `ONEDNN_MAX_CPU_ISA` can hide them.

    Without such instructions torch converts element by element, which takes 15 times as long as float32.
    """
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    asked = getattr(torch.ops.mkldnn, name, None)  # missing in builds without oneDNN
    return asked is not None and bool(asked())
