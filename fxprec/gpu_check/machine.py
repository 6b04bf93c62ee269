"""Item 1: which machine this is, whether fxprec has code for it, and whether its sums are right."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

import torch

from fxprec import compat
from fxprec.gpu_check.ground import Ground, require

_DRY = "or run fxprec gpu-check --dry, which checks on a CPU what it can"


def check(ground: Ground) -> None:
    """Record the machine. Refuse a machine for which fxprec generates no code."""
    ground.fact("versions", versions())
    if ground.on_gpu:
        why = refused()
        if why is not None:
            ground.findings.refused = why
            return
        ground.fact("gpu", gpu(ground.device))
    with ground.case("sums of ones"):
        x = torch.ones(1 << 16, device=ground.device)
        require(float(x.sum()) == 1 << 16, f"2^16 ones add up to {float(x.sum())}")
    with ground.case("versions that were tried"):
        require(not compat.newer_than_tried(), "; ".join(compat.newer_than_tried()))


def refused() -> str | None:
    """Return in one line why nothing can be checked here, or None."""
    if torch.version.hip is not None:
        return f"this torch is AMD's (ROCm {torch.version.hip}): fxprec's code is for NVIDIA's GPUs; {_DRY[3:]}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a build for CUDA, {_DRY}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES, {_DRY}"
    device = torch.device("cuda", torch.cuda.current_device())
    why = compat.refused_gpu(device)
    if why is None and (why := compat.no_triton(device)) is not None:
        why = f"generated kernels cannot run: {why}"
    return None if why is None else f"{why}; take another GPU, {_DRY}"


def versions() -> dict[str, object]:
    """Return the versions on which numbers depend."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "system": f"{platform.system()} {platform.machine()}"}
    for name in ("fxprec", "torch", "triton", "numpy", "torchao"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name != "torchao":
                found[name] = "found" if importlib.util.find_spec(name) else "absent"
    return found | {"cuda": torch.version.cuda or "none"}


def gpu(device: torch.device) -> dict[str, Any]:
    """Return what torch and the driver report about the GPU."""
    facts = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    listed = _nvidia_smi("-L") or ""
    return {
        "name": facts.name,
        "sm": 10 * facts.major + facts.minor,
        "driver": _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader") or "unknown",
        "mig": "MIG" in facts.name or "MIG " in listed,
        "multiprocessors": facts.multi_processor_count,
        "memory_bytes": total,
        "free_bytes": free,
        "gpus": torch.cuda.device_count(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none",
    }


def _nvidia_smi(*options: str) -> str | None:
    """Return the first line that ``nvidia-smi`` prints (``-L``: all lines), or None if it does not run."""
    try:
        run = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() if options == ("-L",) else run.stdout.strip().partition("\n")[0]
