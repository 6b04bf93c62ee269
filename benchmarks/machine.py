"""What a benchmark result must say about where it was measured."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_OTHERS = ("torchao", "bitsandbytes", "transformers", "timm", "torchvision")
"""Rivals, and libraries whose models are judged: named where they are installed."""
_MISSING = "not installed"
RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """Return processor, cores and versions."""
    versions = {name: _version(name) for name in ("torch", "triton", "fxprec", *_OTHERS)}
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": {name: v for name, v in versions.items() if name not in _OTHERS or v != _MISSING},
        "command": "python -m " + " ".join([_module_name(), *sys.argv[1:]]),
    }


def _processor() -> str:
    """Return the processor that torch uses; the environment can hide instructions that ``cpu`` lists."""
    from fxprec.config.processor import Processor

    return str(Processor.here())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a tree, as on a lent GPU
        return _MISSING


def _module_name() -> str:
    path = Path(sys.argv[0]).with_suffix("")
    return ".".join(path.parts[path.parts.index("benchmarks") :]) if "benchmarks" in path.parts else path.name


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    found = re.search(r"model name\s*:\s*(.*)", text)
    features = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {name}" in text]
    return f"{found.group(1) if found else platform.processor()} ({', '.join(features)})"


def save(name: str, rows: Any) -> Path:
    """Write one result file, named by date and ``name``; return its path."""
    machine = describe()
    path = RESULTS / f"{machine['date']}-{name}.json"
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return path
