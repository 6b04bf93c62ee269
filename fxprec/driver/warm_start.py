"""Store a graph's code, plan and promotions in AOTAutograd's cache, so that a second process neither traces nor plans.

The stored value depends on the key alone: the key covers everything that a plan depends on, fxprec's sources too.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from fxprec import compat, passes, runtime
from fxprec.config import Settings
from fxprec.config.processor import Processor
from fxprec.driver.attempts import CodePeak
from fxprec.driver.capture import Captured
from fxprec.driver.compiled import Compiled
from fxprec.driver.event_log import EventLog, Said
from fxprec.passes.lowering.lowered import Lowered
from fxprec.passes.notice import Notice
from fxprec.plan import Plan
from fxprec.plan.files import dumps


@dataclass(frozen=True)
class KnownHalf:
    """Plain data that is stored beside the code of a half, so that a process can run the half."""

    name: str
    """``"forward"`` or ``"backward"``."""
    lowered: Lowered
    num_outputs: int
    """Number of the half's own outputs, which come before the statistics that are appended."""
    said: tuple[Said, ...]
    """Events of the compilation; each process that takes the code from the cache repeats the events."""
    donated: tuple[int, ...]
    """Positions of the inputs that the code may overwrite."""
    graph: Compiled
    """The graph as known when the half was compiled; the backward half's says how both halves were lowered."""
    peak: CodePeak | None = None
    """The peak of both halves under a peak budget, with the backward half. It may be above the budget."""


def plan_key(
    settings: Settings, captured: Captured, given: Plan | None, trained: Sequence[Plan], more: Sequence[object]
) -> str:
    """Return a hash of everything that a plan depends on besides the graph's code, which torch's own key covers."""
    key = hashlib.sha256(sources().encode())
    facts = (
        settings.asked.to_dict() | {"storage": settings.storage},
        None if given is None else dumps(given),
        [dumps(plan) for plan in trained],
        [repr(known) for known in captured.inputs],
        repr(captured.ambient),
        machine(captured.device),
        [str(fact) for fact in more],
    )
    for fact in (*map(_text, facts), *compat.traced_facts(captured.gm)):
        key.update(fact.encode() + b"\0")
    return f"fxprec-{key.hexdigest()}"


def _text(fact: object) -> str:
    return json.dumps(fact, default=str)


def machine(device: torch.device) -> str:
    """Return facts of the machine that a plan or its code may depend on and that torch's key leaves out."""
    gpu = _kind_of_gpu(device) if device.type == "cuda" else ()
    versions = (platform.python_version(), np.__version__, str(Processor.here()))
    return " ".join((*versions, platform.machine(), *gpu))


def _kind_of_gpu(device: torch.device) -> tuple[str, ...]:
    """Return facts that equal GPUs share. torch's own text of a GPU includes its serial number and bus address."""
    found = torch.cuda.get_device_properties(device)
    return (found.name, *map(str, (found.major, found.minor, found.total_memory, found.multi_processor_count)))


@cache
def sources() -> str:
    """Return a hash of every source file of fxprec, so that changed sources do not get old code from the cache."""
    folders = (Path(compat.__file__).parents[1], *(Path(p) for package in (passes, runtime) for p in package.__path__))
    return _hash_of(path for folder in folders for path in _files(folder))


@cache
def codegen_sources() -> str:
    """Return a hash of the source files that affect which code Inductor generates for a lowered graph."""
    analysis = Path(passes.__path__[0], "analysis")
    order = (analysis / "kernel_order.py", analysis / "replay" / "kernels.py", analysis / "replay" / "workspace.py")
    return _hash_of([*_files(Path(compat.__file__).parent), *order, Path(__file__).with_name("half_compilation.py")])


def _files(folder: Path) -> Iterator[Path]:
    """Iterate over source files. Bytecode is left out: another process may be writing it under temporary names."""
    return (path for path in folder.rglob("*") if path.parent.name != "__pycache__" and path.is_file())


def _hash_of(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def repeat_events(log: EventLog, said: Sequence[Said], step: int) -> None:
    """Repeat the warnings and events of the compilation. Raises `FallbackError` under ``strict``, as compiling does."""
    for kind, site, detail in said:
        if kind == "fallback":
            log.tell(site, detail, step=step)
        elif kind == "machine":
            log.fact(Notice(site, detail))
        else:
            log.note(kind, site, detail, step=step)
