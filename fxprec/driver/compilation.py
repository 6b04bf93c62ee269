"""Compile one captured graph with ``compile_fx``: take the code from the cache, or run the passes in its callbacks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
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
import fxprec.runtime.grouped_mm
import fxprec.runtime.host
import fxprec.runtime.reference_ops
import fxprec.runtime.scaled_mm  # noqa: F401  all register implementations
from fxprec import compat
from fxprec.config import Config, Settings
from fxprec.driver import progress
from fxprec.driver.attempts import PeakAttempts, SavedAttempts, can_confirm, confirmed
from fxprec.driver.capture import Captured
from fxprec.driver.compiled import CodePeak, Compiled, KnownHalf, Retry, Stop, plan_key, sources
from fxprec.driver.event_log import EventLog
from fxprec.driver.lowering import Lowering
from fxprec.driver.option_checks import settings_on
from fxprec.driver.wrappers import Run, entered, named_launches, ranged, with_stats
from fxprec.errors import BudgetError
from fxprec.passes.lowering.lowered import Lowered
from fxprec.passes.name_grouped import name_grouped
from fxprec.passes.narrow_attention import narrow_attention
from fxprec.plan import PeakBytes, Plan
from fxprec.runtime.controller import Controller
from fxprec.runtime.stats import StatsQueue

if TYPE_CHECKING:
    from fxprec.driver.interpreter import Calibration
    from fxprec.driver.joint_compilation import JointCompilation
    from fxprec.driver.memory import StepMemory
    from fxprec.driver.numerics_watch import NumericsWatch
    from fxprec.driver.record import Recorder, TensorDump
    from fxprec.driver.updates import Updates
    from fxprec.plan.rows import WholeStep
    from fxprec.report.folder import GraphDump

log = logging.getLogger(__name__)  # TORCH_LOGS="fxprec" shows it, "+fxprec" the passes too


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """State shared by all compilations of one graph."""

    settings: Settings
    lowering: Lowering
    budget: SavedAttempts
    peak: PeakAttempts
    log: EventLog
    trained: Callable[[], tuple[Plan, ...]]
    """Returns the plans of the model's training graphs, the latest last."""
    controller: Callable[[], Controller | None]
    """Returns the graph's controller, or None before the graph has a plan."""
    tried: list[float] = field(default_factory=list)
    """Seconds of each attempt since the graph last took a compilation, including attempts that broke a budget."""
    queue: StatsQueue = field(default_factory=StatsQueue)
    """Receives the statistics that the compiled code returns."""
    calibration: Calibration | None = None
    dump: GraphDump | None = None
    recorder: Recorder | None = None
    tensors: TensorDump | None = None
    numerics: NumericsWatch | None = None
    memory: StepMemory | None = None
    """Compares the first step's measured memory with the plan, on a GPU under a peak budget."""
    updates: Updates | None = None
    """The parameters that backward steps, if the backend has an optimizer."""
    whole_step: WholeStep | None = None
    """The bytes that a step budget counts beside the peak."""
    confirms: bool = True
    """Whether a budget that an error names is compiled for first, which shows that it is enough."""

    @classmethod
    def of(
        cls,
        captured: Captured,
        settings: Settings,
        log: EventLog,
        trained: Callable[[], tuple[Plan, ...]],
        controller: Callable[[], Controller | None],
        *,
        dump: GraphDump | None,
        recorder: Recorder | None,
    ) -> Compiler:
        """Return the compiler of a graph on its device. ``controller`` returns the graph's controller, or None."""
        device, plans_only = captured.device, dump is not None and dump.plan_only
        held = settings_on(device, settings, log, plans_only=plans_only)
        calibration = tensors = memory = numerics = None
        if settings.asked.policy == "exact":  # imports in the branches below: few runs need them
            from fxprec.driver.interpreter import Calibration

            calibration = Calibration()
        if settings.asked.dump_tensors:
            from fxprec.driver.record import TensorDump

            assert dump is not None, "Backend refuses dump_tensors without a folder"
            tensors = TensorDump(held, dump, log, controller)
        if settings.asked.watch_every is not None:
            from fxprec.driver.numerics_watch import NumericsWatch

            numerics = NumericsWatch(settings.asked.watch_every, log, controller)
        if device.type == "cuda":
            from fxprec.driver.memory import StepMemory

            memory = StepMemory(log, device, lambda: None if (c := controller()) is None else c.plan.peak_bytes)
        return cls(
            settings=held,
            lowering=Lowering(settings.asked, device, log.notice),
            budget=SavedAttempts(held, log),
            peak=PeakAttempts(log),
            log=log,
            trained=trained,
            controller=controller,
            calibration=calibration,
            dump=dump,
            recorder=recorder,
            tensors=tensors,
            numerics=numerics,
            memory=memory,
        )

    @property
    def plans_only(self) -> bool:
        """Whether the run makes plans only and executes nothing."""
        return self.dump is not None and self.dump.plan_only

    @property
    def stepped(self) -> Mapping[int, int]:
        """The parameters that backward steps: position among the graph's inputs, and workspace of the step in bytes."""
        return {} if self.updates is None or self.recorder is not None else self.updates.workspaces

    def of_reference(self, recorder: Recorder) -> Compiler:
        """Return a compiler of the graph's reference lowering, which ``recorder`` sees."""
        asked = replace(self.settings.asked, lowering="eager", mode="default", verify=False)
        return replace(
            self,
            settings=replace(self.settings, asked=asked),
            lowering=Lowering(asked, self.lowering.device, self.log.notice),
            dump=None,
            recorder=recorder,
            tensors=None,
            numerics=None,
        )

    def wrapped(self, run: Run, half: str, lowered: Lowered, num_outputs: int) -> Run:
        """Wrap the half called ``half``, so that its statistics go to the queue and not into the results."""
        run = ranged(run, self.log.name, half)
        run = named_launches(run, lowered.kernel_names, f"{self.log.name}'s {half} half")
        if self.memory is not None:
            run = self.memory.watch(run, half)
        if self.updates is not None and half == "backward":
            run = self.updates.around(run)
        return with_stats(run, lowered, num_outputs, self.queue)

    def key(self, captured: Captured, given: Plan | None, fixed: int) -> str | None:
        """Return the cache key of the code; None if the code cannot be stored, or if a watcher must see it compiled.

        ``fixed``: bytes that are known to be saved beside what an activation budget counts.
        """
        watchers = (self.dump, self.recorder, self.calibration, self.tensors, self.numerics)
        if any(w is not None for w in watchers) or compat.traces_artifacts() or not self.lowering.makes_code:
            return None
        if callable(self.settings.asked.policy):
            return None
        peak = (self.settings.peak_budget, self.peak.part, self.whole_step)
        more = (fixed, self.lowering.name, sorted(self.lowering.without), sorted(self.stepped.items()), *peak)
        return plan_key(self.settings, captured, given, self.trained(), more)


@dataclass
class Compilation:
    """One attempt to compile a graph, from the cache or by tracing."""

    compiler: Compiler
    captured: Captured
    given: Plan | None
    step: int
    key: str | None
    """Cache key of the code; None if the code is not stored."""
    only_looks: bool = False
    """Whether to run the passes only, for the peak bytes under other budgets."""
    traced: JointCompilation | None = None
    """None if the code comes from the cache."""
    stored: list[KnownHalf] = field(default_factory=list)
    """The halves that come from the cache."""

    def compile(self, examples: Sequence[Any]) -> Compiled | Retry:
        """Return the compiled graph, or the `Retry` of another attempt. Raises whatever Inductor raises.

        Code that exceeded its peak budget is in the cache too: it is refused again, and the next attempt has its key.
        """
        gm, table = self.captured.with_table()
        self._prepare(gm)
        try:
            with compat.stored_autograd(self._load if self.key else None), self._whole_step():
                run = self._compile_fx(gm, [*examples, table])
        except Stop as stop:
            return stop.retry
        compiled, peak = self._from_cache() if self.traced is None else self.traced.result()
        plan = compiled.plan
        if plan is not None and peak is not None:
            plan = self.compiler.peak.judged(plan, peak, is_given=self.given is not None, step=self.step)
            if plan is None:
                return Retry(self.captured.capacity)
        if self.traced is None and plan is not None:
            log.info("%s: from the cache: %s", self.compiler.log.name, plan.summary())
        elif self.traced is not None and plan is not None and plan is not compiled.plan:
            self.traced.set_plan(plan)
        return replace(compiled, plan=plan, run=run)

    def _from_cache(self) -> tuple[Compiled, CodePeak | None]:
        """Return the stored graph and the peak of its code; repeat the notices that its compilation gave."""
        for half in self.stored:
            self.compiler.log.repeat(half.said, self.step)
        return self.stored[-1].graph, self.stored[-1].peak

    def _compile_fx(self, gm: GraphModule, examples: Sequence[Any]) -> Run:
        settings = self.compiler.settings
        run: Run = compat.compile_fx(
            gm,
            examples,
            inner_compile=self._compile_half,
            decompositions=None if settings.accumulator is None else compat.whole_gemms(),
            config_patches=compat.mode_settings(settings.asked.mode)
            | (compat.ROUNDED_AT_EVERY_OPERATOR if settings.recipe.pure else {})
            | {
                "joint_custom_pre_pass": compat.GraphPass(self._run_passes, self.key or sources()),
                "custom_partitioner_fn": compat.Partitioner(self._partition, sources()),
            },
        )
        return run

    def _prepare(self, gm: GraphModule) -> None:
        """Edit the captured graph before torch traces it, which fixes attention's kernel and how experts are traced."""
        name_grouped(gm)
        captured = self.captured
        stays = narrow_attention(gm, captured.device, self.compiler.settings, is_training=captured.identity.is_training)
        if stays is not None:
            self.compiler.log.warn_once(stays.site, stays.detail, step=self.step)
        for site, why in compat.without_effect(is_cut=self._fits_peak):
            self.compiler.log.warn_once(site, why, step=self.step)

    @property
    def _fits_peak(self) -> bool:
        asked = self.compiler.settings.peak_budget if self.given is None else self.given.peak_bytes
        return asked is not None

    def _whole_step(self) -> contextlib.AbstractContextManager[None]:
        """Compile both halves at once if a peak budget bounds both, or if the plan must say how each is lowered."""
        chooser = self.compiler.lowering.chooser
        chooses = chooser is not None and chooser.why_inductor() is None
        return compat.backward_at_once() if self._fits_peak or chooses else contextlib.nullcontext()

    def _tracing(self) -> JointCompilation:
        if self.traced is None:
            # Imported here: it imports every pass, which a start from the cache does not need.
            from fxprec.driver.joint_compilation import JointCompilation

            self.traced = JointCompilation(replace(self))  # a copy, so that the two are no reference cycle
        return self.traced

    def _run_passes(self, graph: Graph) -> None:
        self._tracing().run_passes(graph)

    def _partition(self, gm: GraphModule, inputs: Sequence[object], **options: object) -> compat.Halves:
        return self._tracing().partition(gm, inputs, **options)

    def _compile_half(self, gm: GraphModule, examples: Sequence[Any], **options: object) -> Run:
        return self._tracing().compile_half(gm, examples, **options)

    def _load(self, known: KnownHalf, run: Run) -> Run:
        """Return a half that comes from the cache, with the same wrappers as a compiled one."""
        self.stored.append(known)
        compiler = self.compiler
        run = compiler.wrapped(run, known.name, known.lowered, known.num_outputs)
        return entered(run, known.lowered, known.donated, compiler.controller)


def compile_graph(compiler: Compiler, captured: Captured, given: Plan | None, step: int) -> Compiled:
    """Compile with the plan ``given``, or solve for one. Repeat if the plan breaks a budget or the table is small.

    ``step`` is the step that events are noted for. Raises `BudgetError`, which names a budget that compiling confirms.
    """
    try:
        return _compile_graph(compiler, captured, given, step)
    except BudgetError as error:
        if given is not None or not can_confirm(compiler, error):
            raise
        raise confirmed(error, compiler, lambda trial: _compile_graph(trial, captured, None, step)) from None


def _compile_graph(compiler: Compiler, captured: Captured, given: Plan | None, step: int) -> Compiled:
    verb = "compiling" if captured.identity.is_training else "compiling for evaluation:"
    with captured.tracing() as examples, progress.telling(f"{verb} {compiler.log.name}"):
        fixed = compiler.budget.fixed  # an activation budget's attempts share a key, and only the last is stored
        while True:
            start = time.perf_counter()
            key = compiler.key(captured, given, fixed)
            try:
                found = Compilation(compiler, captured, given, step, key).compile(examples)
            finally:
                compiler.tried.append(time.perf_counter() - start)
            if isinstance(found, Compiled):
                return replace(found, assumes=captured.guards_since_dynamo())
            captured = replace(captured, capacity=found.capacity)


def look(compiler: Compiler, captured: Captured, step: int) -> PeakBytes | None:
    """Run the passes without compiling, and return the peak bytes under other budgets."""
    with captured.tracing() as examples:
        attempt = Compilation(compiler, captured, None, step, None, only_looks=True)
        attempt.compile(examples)
    return None if attempt.traced is None else attempt.traced.peak


def compile_unplanned(gm: GraphModule, examples: Sequence[Any], config: Config) -> Callable[..., Any]:
    """Return the code of a graph that has nothing to round, by Inductor or, if asked for, by the reference lowering."""
    settings = compat.mode_settings(config.mode)
    result: Callable[..., Any]
    if config.lowering != "eager":
        result = compat.compile_fx(gm, examples, config_patches=settings)
        return result
    from fxprec.driver.interpreter import interpreted  # imported here: a start from the cache imports no pass

    with compat.stored_autograd(None):
        result = compat.compile_fx(gm, examples, lambda half, *_, **__: interpreted(half), config_patches=settings)
    return result
