"""The sections in the order they run: correctness first, what issue 4 judges before what it only asks for."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

from benchmarks.gpu.correctness import correctness
from benchmarks.gpu.gemm import gemm
from benchmarks.gpu.memory_bound import memory_bound
from benchmarks.gpu.statistics_cost import statistics_cost
from benchmarks.gpu.suite import Section
from benchmarks.gpu.training import block, convolutions, model

SECTIONS: dict[str, Section] = {
    "correctness": correctness,
    "memory": memory_bound,
    "gemm": gemm,
    "block": block,
    "statistics": statistics_cost,
    "model": model,
    "convolutions": convolutions,
}


def device_facts() -> dict[str, Any]:
    """Return what a result must say of the GPU: name, memory, driver, CUDA; empty without one."""
    if not torch.cuda.is_available():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_bytes": properties.total_memory,
        "capability": [properties.major, properties.minor],
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
