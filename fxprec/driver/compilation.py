"""Compiling one captured graph: from the cache, or by the passes in the middle of ``compile_fx``."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch.fx import Graph, GraphModule

import fxprec.runtime.arith.gemm_ops
import fxprec.runtime.cpu.blocks
import fxprec.runtime.cpu.layout
import fxprec.runtime.cpu.ops
import fxprec.runtime.cpu.wide_gemms
import fxprec.runtime.gemm.ops
import fxprec.runtime.gemm.reference_ops
import fxprec.runtime.host
import fxprec.runtime.reference_blocks
import fxprec.runtime.reference_ops  # noqa: F401  all register implementations
from fxprec import compat
from fxprec.config import Settings
from fxprec.driver.appended import with_stats
from fxprec.driver.capture import Captured
from fxprec.driver.compiled import CompiledGraph, TableFull
from fxprec.driver.event_log import EventLog
from fxprec.driver.fallback import Compiled, Lowering
from fxprec.driver.launches import named_launches
from fxprec.driver.narrow_attention import narrow_attention
from fxprec.driver.peak_budget import Looked, PeakBudget
from fxprec.driver.ranges import range_name, ranged
from fxprec.driver.saved_budget import PlanAgain, SavedBudget
from fxprec.driver.warm_start import KnownHalf, plan_key, say_again, sources
from fxprec.plan import PeakBytes, Plan
from fxprec.runtime.stats import StatsQueue

if TYPE_CHECKING:
    from fxprec.driver.calibration import Calibration
    from fxprec.driver.recorder import Recorder
    from fxprec.driver.step_memory import StepMemory
    from fxprec.driver.tensor_dump import TensorDump
    from fxprec.driver.traced import Traced
    from fxprec.report.folder import GraphDump

log = logging.getLogger(__name__)  # TORCH_LOGS="fxprec" shows it, "+fxprec" the passes too


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """What all compilations of one graph share."""

    settings: Settings
    lowering: Lowering
    budget: SavedBudget
    peak: PeakBudget
    log: EventLog
    queue: StatsQueue
    """Takes the statistics of what is compiled."""
    trained: Callable[[], tuple[Plan, ...]]
    """Gives the plans of the model's training graphs, the latest last."""
    calibration: Calibration | None
    dump: GraphDump | None
    recorder: Recorder | None = None
    tensors: TensorDump | None = None
    memory: StepMemory | None = None
    """Compares the first step with the plan, under a peak budget."""

    def watched(self, run: Compiled, half: str) -> Compiled:
        """Return ``run``, the half of that name, whose first step's memory is compared where that is wanted."""
        return run if self.memory is None else self.memory.watch(run, half)

    def compile(self, captured: Captured, given: Plan | None, examples: Sequence[Any], step: int) -> CompiledGraph:
        """Compile for a plan, or solve one. What a first plan saves, and how many rows it takes, may ask for another.

        ``step`` is the one events are noted for.
        """
        key = self._key(captured, given)
        while True:
            attempt = Compilation(self, captured, given, step, key)
            try:
                return attempt.compile(examples)
            except PlanAgain:
                continue
            except TableFull as full:
                captured = captured.with_room_for(full.rows)

    def _key(self, captured: Captured, given: Plan | None) -> str | None:
        """Return what the code can be stored under; None where it cannot, or someone looks on as it is compiled."""
        watchers = (self.dump, self.recorder, self.calibration, self.tensors)
        if any(w is not None for w in watchers) or compat.traces_artifacts() or not self.lowering.makes_code:
            return None
        held = self.settings.peak_budget is not None or (given is not None and given.peak_bytes is not None)
        if callable(self.settings.asked.policy) or held:  # a plan held to its peak may be refused once it is compiled
            return None
        more = (self.budget.fixed, self.lowering.name, sorted(self.lowering.without))
        return plan_key(self.settings, captured, given, self.trained(), more)

    def look(self, captured: Captured, step: int) -> PeakBytes | None:
        """Return what the passes find of other peak budgets, and compile nothing."""
        part = self.peak.part
        self.peak.part, self.peak.only_looks = replace(part, wants_curve=True), True
        try:
            self.anew(captured, None, step)
        except Looked as looked:
            return looked.peak
        finally:
            self.peak.part, self.peak.only_looks = part, False
        return None

    def anew(self, captured: Captured, given: Plan | None, step: int) -> CompiledGraph:
        """Compile again, outside of Dynamo."""
        with captured.tracing(), compat.backward_at_once():
            return self.compile(captured, given, captured.fake_examples, step)


@dataclass
class Compilation:
    """One attempt."""

    compiler: Compiler
    captured: Captured
    given: Plan | None
    step: int
    key: str | None
    """What the code is stored under; None: it is not."""
    traced: Traced | None = None  # where the cache had nothing
    found: list[KnownHalf] = field(default_factory=list)  # in the cache

    def compile(self, examples: Sequence[Any]) -> CompiledGraph:
        """Raises `PlanAgain` and `TableFull` for another attempt, and whatever Inductor raises."""
        start = time.perf_counter()
        gm, table = self.captured.with_table()
        settings = self.compiler.settings
        self._prepare(gm)
        with compat.stored_autograd(self._load if self.key else None), self._whole_step():
            run = compat.compile_fx(
                gm,
                [*examples, table],
                inner_compile=self._compile_half,
                decompositions=None if settings.accumulator is None else compat.whole_gemms(),
                config_patches=compat.mode_settings(settings.asked.mode)
                | (compat.ROUNDED_AT_EVERY_OPERATOR if settings.recipe.pure else {})
                | {
                    "joint_custom_pre_pass": compat.GraphPass(self._run_passes, self.key or sources()),
                    "joint_custom_post_pass": compat.GraphPass(self._after_torchs_passes, sources()),
                },
            )
        made = self._from_cache(run) if self.traced is None else self.traced.finished(run)
        return replace(made, seconds=time.perf_counter() - start)

    def _prepare(self, gm: GraphModule) -> None:
        """Rewrite what torch decides while it traces: the kernel of attention."""
        captured = self.captured
        stays = narrow_attention(gm, captured.device, self.compiler.settings, is_training=captured.identity.is_training)
        if stays is not None:
            self.compiler.log.warn_once(stays.site, stays.detail, step=self.step)

    def _whole_step(self) -> contextlib.AbstractContextManager[None]:
        """Compile both halves now where a budget binds them together, or the plan says how each is lowered."""
        asked = self.compiler.settings.peak_budget if self.given is None else self.given.peak_bytes
        chooser = self.compiler.lowering.chooser
        chooses = chooser is not None and chooser.why_inductor() is None
        return compat.backward_at_once() if asked is not None or chooses else contextlib.nullcontext()

    def _tracing(self) -> Traced:
        if self.traced is None:
            from fxprec.driver.traced import Traced  # every pass: what comes from the cache needs none

            self.traced = Traced(self.compiler, self.captured, self.given, self.step, self.key)
        return self.traced

    def _run_passes(self, graph: Graph) -> None:
        self._tracing().run_passes(graph)

    def _after_torchs_passes(self, graph: Graph) -> None:
        self._tracing().after_torchs_passes(graph)

    def _compile_half(self, gm: GraphModule, examples: Sequence[Any], **options: Any) -> Compiled:
        return self._tracing().compile_half(gm, examples, **options)

    def _load(self, known: KnownHalf, run: Compiled) -> Compiled:
        """Say how a half runs that the cache has."""
        self.found.append(known)
        compiler = self.compiler
        run = ranged(run, range_name(compiler.log.name, known.name))
        run = named_launches(run, known.lowered.kernel_names, f"{compiler.log.name}'s {known.name} half")
        run = compiler.watched(run, known.name)
        return with_stats(run, known.lowered, known.num_outputs, compiler.queue)

    def _from_cache(self, run: Compiled) -> CompiledGraph:
        """Take over what was found out when the halves in the cache were compiled."""
        for half in self.found:
            say_again(self.compiler.log, half.said, self.step)
        known = self.found[-1].graph  # backward's knows how both were lowered
        if known.planned is not None:
            log.info("%s: from the cache: %s", self.compiler.log.name, known.planned.plan.summary())
        return CompiledGraph.of(run, self.captured, known.planned, is_training=known.is_training, copied=known.copied)
