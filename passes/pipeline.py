"""The order of the passes, as one list for each semantics, and the runner."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.fx import Graph

from fxprec.config import Settings
from fxprec.errors import FxprecError, PassError
from fxprec.passes.assign_precision import AssignPrecision
from fxprec.passes.base import Pass, Work
from fxprec.passes.block_gemms import BlockGemms
from fxprec.passes.carry_scales import CarryScales
from fxprec.passes.choose_crossings import ChooseCrossings
from fxprec.passes.compare_in_forward import CompareInForward
from fxprec.passes.compute_high import ComputeHigh
from fxprec.passes.drop_round_trips import DropRoundTrips
from fxprec.passes.group_tensors import GroupTensors
from fxprec.passes.insert_casts import InsertCasts
from fxprec.passes.insert_observers import InsertObservers
from fxprec.passes.keep_signs import KeepSigns
from fxprec.passes.low_gemms import LowGemms
from fxprec.passes.make_again import MakeAgain
from fxprec.passes.narrow_accumulators import NarrowAccumulators
from fxprec.passes.narrow_gemms import NarrowGemms
from fxprec.passes.pass_report import PassReport, target_text
from fxprec.passes.recover_operators import RecoverOperators
from fxprec.passes.scale_copies import ScaleCopies
from fxprec.passes.shorten_lives import ShortenLives
from fxprec.passes.smooth_swiglu import SmoothSwiGLU
from fxprec.passes.store_centred import StoreCentred
from fxprec.passes.sum_narrow import SumNarrow
from fxprec.passes.weigh_gemms import WeighGemms
from fxprec.passes.widen_attention import WidenAttention
from fxprec.passes.write_plan import WritePlan

log = logging.getLogger(__name__)

# Native and packed storage: operators read unrounded values; copies are stored for backward and for GEMMs over codes.
PIPELINE: tuple[Pass, ...] = (
    WidenAttention(),  # before RecoverOperators pairs operators with tensors: the plan is made of float32 tensors
    SmoothSwiGLU(),  # before GroupTensors: the scaled product is the tensor to count, store and round
    CompareInForward(),  # before GroupTensors: a tensor that backward no longer reads gets no site
    RecoverOperators(),  # reads autograd's metadata, which later passes disturb
    GroupTensors(),  # needs operators in execution order
    AssignPrecision(),  # needs group sizes
    InsertCasts(),  # needs the set of low tensors
    WeighGemms(),  # needs the casts beside each GEMM
    ComputeHigh(),  # needs to know which GEMMs multiply codes; removes casts
    StoreCentred(),  # needs the stored copies that ComputeHigh left
    MakeAgain(),  # needs each copy at its final node, which StoreCentred may change
    CarryScales(),  # needs the casts that are left; its rows of the scale table come after the sites'
    BlockGemms(),  # after CarryScales: its casts have neither site nor scale
    NarrowGemms(),  # needs the casts beside each GEMM
    DropRoundTrips(),  # after NarrowGemms, which leaves bf16 -> float32 -> bf16 between two GEMMs
    SumNarrow(),  # needs the bfloat16 copies that GEMMs multiply
    LowGemms(),  # after NarrowGemms: a GEMM over codes keeps the result dtype that its GEMM has by then
    ShortenLives(),  # needs the graph that will run
    ChooseCrossings(),  # needs the lifetimes of all tensors
    KeepSigns(),  # after ChooseCrossings, which finds a copy by the node that quantize reads: inserts a where before it
    ScaleCopies(),  # needs the copies and readers that are left
    WritePlan(),  # needs the sites and the answers of WeighGemms
)

# Storage ``simulate``: every counted tensor is rounded for every reader, as in the papers, and kept in float32.
SIMULATION: tuple[Pass, ...] = (
    SmoothSwiGLU(),
    RecoverOperators(rounds_log_softmax=True),
    GroupTensors(copies_parameters=True),
    AssignPrecision(rounds_values=True),
    InsertCasts(everywhere=True),
    WeighGemms(multiplies_codes=False),  # fills the plan's answer for each GEMM
    CarryScales(),
    BlockGemms(),  # rounds again what the sites' casts rounded; before NarrowAccumulators replaces the GEMMs
    NarrowAccumulators(),  # needs operators paired with the GEMMs that it replaces
    WritePlan(),
)

# Policy "exact" measures damage in a step compiled by these passes. They match the pipeline up to GroupTensors, so both
# count the same tensors.
CALIBRATION: tuple[Pass, ...] = (
    WidenAttention(),
    SmoothSwiGLU(),
    CompareInForward(),
    RecoverOperators(),
    GroupTensors(),
    InsertObservers(),  # in place of casts: measures the damage that casts would do
    NarrowGemms(only_attention=True),  # a GPU's flash attention and cuDNN kernels take no float32
)
SIMULATED_CALIBRATION: tuple[Pass, ...] = (*SIMULATION[:3], InsertObservers())


def pipeline_for(settings: Settings) -> tuple[Pass, ...]:
    """Return the passes that plan a graph and rewrite it."""
    return SIMULATION if settings.is_simulated else PIPELINE


def calibration_for(settings: Settings) -> tuple[Pass, ...]:
    """Return the passes of the step that measures damage for policy ``"exact"``."""
    return SIMULATED_CALIBRATION if settings.is_simulated else CALIBRATION


Observer = Callable[[PassReport, Work], None]


def run(work: Work, passes: Sequence[Pass], observer: Observer | None = None) -> list[PassReport]:
    """Run ``passes`` over ``work``, lint the graph after each pass that changed it, and remove dead code at the end."""
    reports = []
    for step in passes:
        before = _counts(work.joint.graph)
        start = time.perf_counter()
        _apply(step, work)
        seconds = time.perf_counter() - start
        report = PassReport(step.name, seconds, _changes(before, _counts(work.joint.graph)))
        if report.changed:
            work.joint.graph.lint()
        log.debug("%s: %.3f s, %s", report.name, seconds, report.changed)
        reports.append(report)
        if observer is not None:
            observer(report, work)
    work.joint.graph.eliminate_dead_code()
    return reports


def _apply(step: Pass, work: Work) -> None:
    """Run one pass. Raises `PassError` for an exception that is not a `FxprecError`, and logs its traceback."""
    try:
        step.apply(work)
    except FxprecError:
        raise
    except Exception as error:
        log.exception("pass %s failed", step.name)
        place = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise PassError(
            f"pass {step.name} failed with {cause} ({Path(place.filename).name}:{place.lineno}), a fault of fxprec, "
            "not of the model; compile without fxprec for now, and report the text above and that of `fxprec env`"
        ) from error


def _counts(graph: Graph) -> Counter[str]:
    found: Counter[str] = Counter()
    for target, count in Counter(n.target for n in graph.nodes if n.op == "call_function").items():
        found[target_text(target)] += count  # two overloads may print alike
    return found


def _changes(before: Counter[str], after: Counter[str]) -> dict[str, tuple[int, int]]:
    names = sorted(before.keys() | after.keys())
    return {name: (before[name], after[name]) for name in names if before[name] != after[name]}
