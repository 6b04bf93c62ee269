"""The result of compiling a captured graph: one immutable value, which a graph swaps whole and the cache stores.

AOTAutograd's cache keeps code, plan and promotions, so that a second process neither traces nor plans. What is stored
depends on the key alone: the key covers everything that a plan depends on, fxprec's sources too.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fxprec import compat, passes, runtime
from fxprec.config import Settings
from fxprec.config.grad_scaling import LossScaling
from fxprec.config.processor import Processor
from fxprec.driver.event_log import Said
from fxprec.driver.wrappers import Run
from fxprec.passes.lowering.lowered import Lowered
from fxprec.passes.lowering.rows import WatchedRows
from fxprec.passes.pass_report import PassReport
from fxprec.plan import Plan
from fxprec.plan.files import dumps
from fxprec.plan.scales import ScaleGraph
from fxprec.runtime.controller import Controller, Rules
from fxprec.runtime.nonfinite import NonfiniteWatch
from fxprec.runtime.scaling.copies import CopyScales
from fxprec.runtime.scaling.keeper import Keeper, keeper_of
from fxprec.runtime.stats import StatsQueue

if TYPE_CHECKING:
    from fxprec.driver.capture import Captured, SizeGuards
    from fxprec.passes.analysis.replay.other_sizes import OtherSizes


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The code of a graph, with its plan and scales. The cache stores the value without the last three fields."""

    capacity: int
    """Rows of the scale table that the code reads."""
    is_training: bool = False
    plan: Plan | None = None
    """The plan of the code; None for a calibration step, and for a graph that is not planned."""
    scales: ScaleGraph | None = None
    rows: WatchedRows = field(default_factory=WatchedRows)
    num_results: int = 0
    """Number of the forward half's own outputs; the tensors saved for backward come after them."""
    contiguous: tuple[int, ...] = ()
    """Positions among the results of the backward half: gradients of contiguous parameters."""
    copied: tuple[int, ...] = ()
    """Positions of the inputs of which backward reads a stored copy."""
    is_calibration: bool = False
    assumes: SizeGuards | None = None
    """Conditions on sizes that Dynamo does not check."""
    peak_sizes: OtherSizes | None = None
    """The peaks of other input sizes, under a peak budget and dynamic shapes."""
    passes: tuple[PassReport, ...] = ()
    """One report per pass; empty if the code comes from the cache."""
    run: Run | None = None
    """Takes the graph's inputs and the scale table; None until both halves are compiled."""


@dataclass(frozen=True)
class CodePeak:
    """The peak of a compiled step, as its code allocates; the cache stores it beside the code."""

    bytes: int | None
    """None if the code was not understood."""
    waiting: int
    """Bytes that are live between the halves."""
    live: tuple[int, ...]
    """Live bytes at up to 100 moments of the step."""
    unread: str
    """Why the code was not understood; empty if it was."""


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


@dataclass(frozen=True)
class Retry:
    """The result of an attempt that must be repeated, with other budget bounds or with a larger scale table."""

    capacity: int


class Stop(Exception):
    """Exception that leaves torch's ``compile_fx`` from one of its callbacks, which cannot return a `Retry`."""

    def __init__(self, retry: Retry) -> None:
        super().__init__(retry)
        self.retry = retry


@dataclass(frozen=True)
class CompileReport:
    """Compile time and pass reports of one graph.

    ``seconds``: one number per compilation, the first one first; each includes all plans that the compilation tried.
    """

    graph: int
    seconds: tuple[float, ...]
    passes: tuple[PassReport, ...]  # of the latest compilation; empty if its code comes from the cache

    @property
    def passes_seconds(self) -> float:
        """Seconds the passes took in the latest compilation."""
        return sum(p.seconds for p in self.passes)


def controller_of(compiled: Compiled, settings: Settings, device: torch.device, queue: StatsQueue) -> Controller:
    """Return the controller of compiled code: it keeps plan and statistics during training."""
    assert compiled.plan is not None
    action, has_true_infs = settings.asked.on_nonfinite, not isinstance(settings.grad_scaling, LossScaling)
    gradients, copies = keepers_of(compiled, settings)
    return Controller(
        compiled.plan,
        Rules(promote_above=settings.asked.promote_above, hi=settings.recipe.hi.name),
        compiled.capacity,
        device,
        keeper=gradients,
        copies=copies,
        queue=queue,
        nonfinite=None if action == "ignore" else NonfiniteWatch(gradients=has_true_infs, action=action),
    )


def keepers_of(compiled: Compiled, settings: Settings) -> tuple[Keeper | None, CopyScales | None]:
    """Return what keeps the scales of gradients, and of stored copies, during training; None if none has a scale."""
    scales, scaling, above = compiled.scales, settings.grad_scaling, settings.asked.promote_above
    if scales is None:
        return None, None
    gradients = keeper_of(scaling, scales, above) if scales.variables and scaling is not None else None
    return gradients, CopyScales(scales, above) if scales.copies else None


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
    texts = (json.dumps(fact, default=str) for fact in facts)
    for fact in (*texts, *compat.traced_facts(captured.gm)):
        key.update(fact.encode() + b"\0")
    return f"fxprec-{key.hexdigest()}"


def machine(device: torch.device) -> str:
    """Return facts of the machine that a plan or its code may depend on and that torch's key leaves out."""
    facts = [platform.python_version(), np.__version__, Processor.here(), platform.machine()]
    if device.type == "cuda":  # what equal GPUs share: torch's own text of a GPU has its serial number and bus address
        gpu = torch.cuda.get_device_properties(device)
        facts += [gpu.name, gpu.major, gpu.minor, gpu.total_memory, gpu.multi_processor_count]
    return " ".join(map(str, facts))


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
