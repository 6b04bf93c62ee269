"""What torch says of the processor it runs on."""

from __future__ import annotations

import torch


def cpu_vectors() -> str:
    """Return the instruction set that torch's CPU kernels use, ``"avx512"``; `ATEN_CPU_CAPABILITY` lowers it."""
    return torch.backends.cpu.get_cpu_capability().lower()


def has_cpu_gemm(dtype: torch.dtype) -> bool:
    """Say whether oneDNN has instructions for GEMMs of a 16-bit dtype; `ONEDNN_MAX_CPU_ISA` can hide them.

    Where it has none, torch converts element by element, which takes 15 times as long as float32.
    """
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    asked = getattr(torch.ops.mkldnn, name, None)  # not in builds without oneDNN
    return asked is not None and bool(asked())
