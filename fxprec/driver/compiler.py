"""State shared by all compilations of one graph, and the inputs of one attempt to compile the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fxprec import compat
from fxprec.config import Settings
from fxprec.driver.attempts import CodePeak, PeakAttempts, SavedAttempts
from fxprec.driver.capture import Captured
from fxprec.driver.compiled import Compiled
from fxprec.driver.event_log import EventLog
from fxprec.driver.lowering import Lowering
from fxprec.driver.option_checks import settings_on
from fxprec.driver.warm_start import plan_key
from fxprec.driver.wrappers import Run, named_launches, with_stats
from fxprec.passes.lowering.lowered import Lowered
from fxprec.plan import Plan
from fxprec.runtime.controller import Controller
from fxprec.runtime.stats import StatsQueue

if TYPE_CHECKING:
    from fxprec.driver.interpreter import Calibration
    from fxprec.driver.memory import StepMemory
    from fxprec.driver.numerics_watch import NumericsWatch
    from fxprec.driver.record import Recorder, TensorDump
    from fxprec.driver.updates import Updates
    from fxprec.plan.rows import WholeStep
    from fxprec.report.folder import GraphDump


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
            from fxprec.driver.record import tensor_dump

            tensors = tensor_dump(held, dump, log, controller)
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
class Attempt:
    """The inputs of one attempt to compile a graph."""

    compiler: Compiler
    captured: Captured
    given: Plan | None
    step: int
    key: str | None
    """Cache key of the code; None if the code is not stored."""
    only_looks: bool = False
    """Whether to run the passes only, for the peak bytes under other budgets."""

    def within_peak(self, compiled: Compiled, found: CodePeak | None) -> Compiled | None:
        """Return the graph with the peak of its code in its plan; None if the peak is above the budget.

        Raises `BudgetError` if too many plans were.
        """
        if found is None or compiled.plan is None:
            return compiled
        plan = self.compiler.peak.judged(compiled.plan, found, is_given=self.given is not None, step=self.step)
        return None if plan is None else replace(compiled, plan=plan)
