"""Runs one item in its own process, and writes the findings after every case."""

from __future__ import annotations

import importlib
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from fxprec.gpu_check.findings import Findings
from fxprec.gpu_check.items import Mode


def run(*, item: str, module: str, mode: Mode, path: str, seconds: float) -> None:
    """Run ``check`` of a module, or ``compile_ahead``, and write the findings to ``path``."""
    findings, file = Findings(item, mode), Path(path)
    start, used = time.monotonic(), _processor_seconds()

    def save() -> None:
        findings.seconds = time.monotonic() - start
        findings.processor_seconds = _processor_seconds() - used
        findings.write(file)

    findings.case = "start"
    save()
    try:
        _run(module, mode, findings, seconds, save)
    finally:
        save()
    findings.has_ended = True
    save()


def _run(module: str, mode: Mode, findings: Findings, seconds: float, save: Callable[[], None]) -> None:
    import torch

    from fxprec.gpu_check.ground import Ground

    if mode != "gpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    ground = Ground(torch.device("cuda" if mode == "gpu" else "cpu"), mode, findings, seconds=seconds, save=save)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an item checks the warnings that it needs
        found = importlib.import_module(module)
        (found.compile_ahead if mode == "compiled" else found.check)(ground)
    findings.case = ""


def _processor_seconds() -> float:
    """Return the processor time, in seconds, of this process and of the processes that it has waited for."""
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime
