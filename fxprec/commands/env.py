"""``fxprec env``: print the facts of the machine that a bug report needs."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

from fxprec.commands.output import AsJson, print_json

VARIABLES = (
    "FXPREC_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_LOGS", "TORCH_COMPILE_", "TRITON_", "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "NPY_DISABLE_CPU_FEATURES", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "KMP_", "CXX", "CUDA_VISIBLE_DEVICES", "PYTORCH_",
)  # fmt: skip
"""Prefixes of the environment variables that change what is compiled, or how code runs."""


def env(as_json: AsJson = False) -> None:
    """Print the facts for a bug report: versions, processor, compiler, GPU, environment; and where to report."""
    found = environment()
    if as_json:
        print_json(found)
        return
    width = max(map(len, found))
    for name, value in found.items():
        values = [f"{k}={v}" for k, v in value.items()] or ["none set"] if isinstance(value, dict) else [value]
        for i, line in enumerate(values):
            print(f"{name if i == 0 else '':{width}}  {line}")


def environment() -> dict[str, Any]:
    """Return the versions, the processor, the compiler, the GPU and the variables that numbers and code depend on."""
    variables = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)}
    import torch  # imported after reading the variables, because Inductor sets some of them

    from fxprec import compat
    from fxprec.config.processor import Processor
    from fxprec.gpu_check.machine import versions

    return {
        **versions(),
        "processor": f"{_processor_name()}, planned for as {Processor.here()}",
        "threads": str(torch.get_num_threads()),
        "compiler": compat.cxx_compiler() or "none found: models on a CPU run with lowering='eager' only",
        "gpu": _gpu(),
        "environment": variables,
        "report to": where_to_report(),
    }


def where_to_report() -> str:
    """Return the address of the issue tracker that the installed package names."""
    for entry in metadata.metadata("fxprec").get_all("Project-URL") or ():
        label, _, address = entry.partition(", ")
        if label == "Issues":
            return str(address)
    return "the issue tracker of where this fxprec came from: this installation names none"


def _processor_name() -> str:
    """Return the processor's name from /proc/cpuinfo, or its architecture."""
    import platform

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(named, platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def _gpu() -> str:
    """Return the first GPU's name, architecture and driver, or why there is none."""
    import torch

    from fxprec.gpu_check import machine
    from fxprec.gpu_check.report import shown_gpu

    if torch.version.cuda is None:
        return "none: this torch was built without CUDA"
    if not torch.cuda.is_available():
        return "none found"
    return shown_gpu(machine.gpu(torch.device("cuda", torch.cuda.current_device())))
