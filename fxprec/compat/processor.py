"""Read the CPU's capabilities from torch."""

from __future__ import annotations

import torch


def cpu_vectors() -> str:
    """Return the instruction set of torch's CPU kernels, such as ``"avx512"``; `ATEN_CPU_CAPABILITY` can lower it."""
    return torch.backends.cpu.get_cpu_capability().lower()


def has_cpu_gemm(dtype: torch.dtype) -> bool:
    """Return whether the CPU has instructions for GEMMs of a 16-bit dtype, and oneDNN uses them.

    `ONEDNN_MAX_CPU_ISA` can hide them. Without such instructions torch converts element by element, which takes 15
    times as long as float32.
    """
    return _is_taken(dtype) and not (dtype is torch.bfloat16 and emulates_bf16())


def emulates_bf16() -> bool:
    """Return whether oneDNN multiplies bf16 by AVX-512 instructions for float32, in 3.5 times float32's time.

    A product then takes a float32 copy of its result as workspace.
    """
    has_avx512, has_bf16 = (
        getattr(torch.cpu, name, lambda: True) for name in ("_is_avx512_supported", "_is_avx512_bf16_supported")
    )
    return _is_taken(torch.bfloat16) and bool(has_avx512()) and not has_bf16()


def _is_taken(dtype: torch.dtype) -> bool:
    """Return whether oneDNN takes GEMMs of a 16-bit dtype."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    asked = getattr(torch.ops.mkldnn, name, None)  # missing in builds without oneDNN
    return asked is not None and bool(asked())
