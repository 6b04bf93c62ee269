"""One graph Dynamo captured: compiled, run, and compiled again when its plan changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxprec import compat
from fxprec.config import Settings
from fxprec.config.grad_scaling import LossScaling
from fxprec.driver import capture, saved_state
from fxprec.driver.compilation import Compiler
from fxprec.driver.compiled import CompiledGraph, CompileReport
from fxprec.driver.event_log import EventLog
from fxprec.driver.fallback import Lowering
from fxprec.driver.in_flight import InFlight, Version
from fxprec.driver.modified import Versions, check_backward
from fxprec.driver.parameters import Parameters
from fxprec.driver.peak_budget import PeakBudget, beyond_machine
from fxprec.driver.promotions import GivenUp, in_one_line
from fxprec.driver.saved_budget import SavedBudget
from fxprec.driver.shared_peak import SharedPeak
from fxprec.driver.skip_steps import StepSkipper
from fxprec.driver.steps import Steps
from fxprec.errors import LoweringError, PlanError
from fxprec.passes.analysis.peak.part import Part
from fxprec.passes.notice import Notice
from fxprec.plan import PeakBytes, Plan
from fxprec.plan.compare import low_groups_with
from fxprec.plan.plan import latest_of_gemms
from fxprec.plan.scales import ScaleGraph
from fxprec.runtime.controller import Controller, Nonfinite, Rules
from fxprec.runtime.events import Event
from fxprec.runtime.nonfinite import NonfiniteWatch
from fxprec.runtime.scaling.keeper import Keeper, keeper_of
from fxprec.runtime.stats import StatsQueue

if TYPE_CHECKING:
    from fxprec.driver.calibration import Calibration
    from fxprec.driver.recorder import Recorder
    from fxprec.driver.tensor_dump import TensorDump
    from fxprec.report.folder import GraphDump


class PlannedGraph:
    """The callable Dynamo gets for one captured graph.

    It keeps Dynamo's graph, so a promotion in real storage compiles again without retracing the user's code.
    ``siblings`` are the graphs compiled before it for the same model; ``waiting`` gives the plans of training graphs
    that a checkpoint has and that are not compiled yet.
    """

    compiled: CompiledGraph

    def __init__(
        self,
        captured: capture.Captured,
        parameters: Parameters,
        settings: Settings,
        siblings: Sequence[PlannedGraph],
        skips: StepSkipper | None = None,
        dump: GraphDump | None = None,
        *,
        portable: bool = False,
        recorder: Recorder | None = None,
        waiting: Callable[[], tuple[Plan, ...]] = tuple,
        shared: SharedPeak | None = None,
    ) -> None:
        self.parameters = parameters
        self.captured, self.settings, self.index = captured, _held_by(captured.device, settings), len(siblings)
        self.is_replaced = False  # by what was traced after torch.compiler.reset()
        self.controller: Controller | None = None
        self.seconds: tuple[float, ...] = ()  # that compilations took
        self._siblings, self._waiting, self._skips, self._dump = siblings, waiting, skips, dump
        self._log = EventLog(f"graph {self.index}", strict=settings.asked.strict)
        self._shared = SharedPeak(settings) if shared is None else shared
        self._steps, self._in_flight, self._given_up = Steps(), InFlight(), GivenUp()
        self._is_given = False  # its plan was, by a file or a checkpoint
        self._followed: Plan | None = None  # the training plan an inference graph follows
        self._same: dict[int, bool] = {}  # whether the graph of that index trains the same model
        self._taken: dict[int, Plan] = {}  # by index, the plan of it whose promotions are taken over
        if self.settings.storage != settings.storage:
            self._tell(Notice("storage='native'", _PACKED.format(compat.no_native_fp8(captured.device))))
        if (dump is None or not dump.plan_only) and (
            notice := beyond_machine(self.settings, captured.device)
        ) is not None:
            self._tell(notice)
        self._compiler = Compiler(
            settings=self.settings,
            lowering=Lowering(settings.asked, captured.device, self._tell),
            budget=SavedBudget(self.settings, self._log),
            peak=PeakBudget(self._log),
            log=self._log,
            queue=StatsQueue(),
            trained=self._plans_of_siblings,
            calibration=_calibration(settings),
            dump=dump,
            portable=portable,
            recorder=recorder,
            tensors=self._tensor_dump(dump),
        )

    def _tensor_dump(self, dump: GraphDump | None) -> TensorDump | None:
        if not self.settings.asked.dump_tensors:
            return None
        from fxprec.driver.tensor_dump import tensor_dump  # here and below: what few runs want is not imported by all

        return tensor_dump(self.settings, dump, self._log, lambda: self.controller)

    def compile(self, given: Plan | None) -> PlannedGraph:
        """Compile for the first time: for a plan, or for one to be solved. Inside of Dynamo there are examples."""
        captured = self.captured
        self._is_given = given is not None
        if given is None:
            is_planned_alone = self._dump is not None and self._dump.plan_only
            part = self._shared.first_part(is_cut=captured.is_cut)
            self._compiler.peak.take(Part(is_cut=captured.is_cut) if is_planned_alone else part)
        if captured.examples:
            self._take(self._compiler.compile(captured, given, captured.examples, 0))
        else:
            self._take(self._compiler.anew(captured, given, 0))
        if self._dump is not None:
            self._dump.tell = lambda detail: self._log.tell("dump", detail)
        return self

    @property
    def report(self) -> CompileReport:
        return CompileReport(self.index, self.seconds, self.compiled.passes)

    @property
    def events(self) -> list[Event]:
        return [*self._log.events, *(self.controller.events if self.controller is not None else ())]

    @property
    def is_training(self) -> bool:
        return self.compiled.is_training

    @property
    def folder(self) -> Path | None:
        """Where it is dumped."""
        return None if self._dump is None else self._dump.path

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or None while it is being calibrated."""
        return None if self.controller is None else self.controller.plan

    def __call__(self, *args: Any) -> Any:
        if compat.in_backward():
            return self._recompute(args)
        self._steps.runs_forward = True
        with compat.compile_lock:  # another thread must not promote in between
            self._begin_step()
            version = self._version()
        self._in_flight.note(version)
        return self._run(version, args)

    def _recompute(self, args: Sequence[Any]) -> Any:
        """Run inside a backward pass, for a checkpoint around the compiled code: do what its forward did."""
        if self._steps.runs_forward or not self.is_training:
            version = self._in_flight.recomputed() or self._version()
            with self._compiler.queue.muted():
                return version(*args)
        if self._steps.settle_in_backward():
            self._settle(steps=1)
        elif self.controller is not None:
            self.controller.step += 1
        return self._run(self._version(), args)

    def _run(self, version: Version, args: Sequence[Any]) -> Any:
        if self.compiled.peak_sizes is not None and (excess := self.compiled.peak_sizes.excess(args)) is not None:
            self._tell(Notice("peak_budget", f"{excess}; give it smaller batches"), step=self._step)
        results = version(*args)
        if self.controller is not None:
            if self.is_training:
                check_backward(results, Versions(self.compiled.copied, self.captured.inputs, args))
                if self.controller.plan.peak_bytes is not None and not compat.in_backward():
                    self._shared.saw(self, results)
            if self._skips is not None:
                self._skips.saw(args)
        return results

    def _version(self) -> Version:
        table = self.captured.empty_table() if self.controller is None else self.controller.table
        return Version(self.compiled.run, table)

    def _begin_step(self) -> None:
        self._shared.begin()
        for graph in self._siblings:
            if graph is not self and graph.is_training and graph._steps.settle_in_forward():
                graph._settle(steps=0)
        self._settle(steps=1)

    def _settle(self, *, steps: int) -> None:
        """Make what statistics ask for real, then count ``steps``: where no call recomputes an earlier one."""
        calibration = self._compiler.calibration
        if self.compiled.is_calibration and calibration is not None and calibration.is_complete:
            self._compile_again("solved from the calibration step", None)
        if self.controller is None:
            return
        self.controller.settle()
        if self._dump is not None:
            self._dump.write_stats(self.controller, step=self.controller.step)
        if self.is_training:
            self.share_promotions()
        self.controller.step += steps
        if not self.is_training:
            self._follow_training(self.controller)
        if self.controller.plan is not self.compiled.plan:
            self.follow_plan()
        if self._compiler.lowering.is_stale:
            self._compiler.lowering.is_stale = False
            self._compile_again("without kernels that failed", self.controller.plan)

    @contextmanager
    def recorded(self, recorder: Recorder) -> Iterator[None]:
        """Run the reference lowering of the plan in force meanwhile, which ``recorder`` sees; training goes on.

        Raises what compiling raises, and `LoweringError` where the reference would carry other scales.
        """
        assert self.controller is not None
        asked = replace(self.settings.asked, lowering="eager", mode="default", verify=False)
        compiler = replace(
            self._compiler,
            settings=replace(self.settings, asked=asked),
            lowering=Lowering(asked, self.captured.device, self._tell),
            dump=None,
            recorder=recorder,
            tensors=None,
        )
        usual, seen = self.compiled, compiler.anew(self.captured, self.controller.plan, self.controller.step)
        if not self._carries_alike(seen):
            raise LoweringError(f"{self._log.name}: the reference lowering of its plan carries other scales")
        self.compiled = replace(seen, plan=self.controller.plan)
        try:
            yield
        finally:
            if self.compiled.run is seen.run:  # else a promotion came, and what it compiled stays
                self.compiled = replace(usual, plan=self.controller.plan)

    def _carries_alike(self, seen: CompiledGraph) -> bool:
        keeper = None if self.controller is None else self.controller.keeper
        if keeper is None or seen.scales is None:
            return keeper is None and seen.scales is None and seen.captured.capacity == self.captured.capacity
        return keeper.graph == seen.scales and seen.captured.capacity == self.captured.capacity

    def follow_plan(self) -> None:
        """Make a changed plan real. In ``simulate`` the table already has; real storage is lowered again.

        A promotion never ends a run: where it does not compile, what runs goes on, with a warning and an event.
        Raises `FallbackError` for that under ``strict``.
        """
        controller, in_force = self.controller, self.compiled.plan
        assert controller is not None
        assert in_force is not None
        if not self.settings.is_simulated and controller.plan.formats != in_force.formats:
            try:
                self._compile_again("for the changed plan", controller.plan)
            except Exception as error:  # whatever Inductor raises
                self._tell(self._given_up.stay_with(in_force, controller, error), step=controller.step)
        self.compiled = replace(self.compiled, plan=controller.plan)
        if self._dump is not None:
            self._dump.write_plan(controller.plan)

    def share_promotions(self) -> None:
        """Promote what other training graphs of the model have promoted, those of other batch sizes above all."""
        own = self.controller
        if own is None or not self.is_training or own.rules.promote_above is None:
            return
        for graph in self._siblings:
            theirs = graph.controller
            if theirs is None or theirs is own or graph.is_replaced or not self._trains_the_same(graph):
                continue
            theirs.read(wait=False)
            if self._taken.get(graph.index) is not theirs.plan:
                self._taken[graph.index] = theirs.plan
                own.promote_as(theirs.plan, f"promoted in graph {graph.index}, of the same model")

    def _trains_the_same(self, other: PlannedGraph) -> bool:
        if other.index not in self._same:
            assert self.plan is not None
            assert other.plan is not None
            self._same[other.index] = (
                other.is_training
                and other.plan.gemms_by_name == self.plan.gemms_by_name
                and not other.parameters.of_another(self.parameters)
            )
        return self._same[other.index]

    def _follow_training(self, controller: Controller) -> None:
        """Evaluate as training runs: the same groups low, the same tensors promoted."""
        trained = latest_of_gemms(self._plans_of_siblings(), controller.plan.gemms_by_name)
        if trained is None or trained is self._followed:
            return
        self._followed = trained
        borders = [(g.group_before, g.group_after) for g in controller.plan.gemms]
        if low_groups_with(trained, borders) != controller.plan.low_groups:
            try:
                self._compile_again("to evaluate as training runs", None)
            except Exception as error:  # whatever Inductor raises
                detail = f"evaluates with other tensors low than training has: compiling failed ({in_one_line(error)})"
                self._tell(Notice(self._log.name, detail), step=controller.step)
        controller.promote_as(trained, "promoted in training")

    @property
    def gradient_bytes(self) -> int:
        return self.captured.gradient_bytes

    @property
    def is_provisional(self) -> bool:
        """Whether its plan holds as little as it can, since other graphs of the step were not known."""
        return self._compiler.peak.part.is_provisional

    def peak_with_points(self) -> PeakBytes | None:
        """Return what its plan holds, and would under other budgets; None where the plan was given and stays."""
        peak = None if self.plan is None else self.plan.peak_bytes
        if peak is None or self._is_given:
            return None
        if self._compiler.peak.part.shares:  # its points tell of what waits, too
            return peak
        return self._compiler.look(self.captured, self._step)

    def take_part(self, part: Part) -> None:
        """Plan for a part of the budget and compile again, where it is new."""
        if part == replace(self._compiler.peak.part, beyond=0, beyond_waiting=0):
            return
        for _ in self._compiler.queue.poll(wait=True):
            pass  # statistics of the sites that its plan had
        self._compiler.peak.take(part)
        graphs = "its step" if part.num_graphs == 1 else f"{part.num_graphs} graphs of a step"
        self._compile_again(f"within the peak budget of {graphs}", None)

    @property
    def _step(self) -> int:
        return 0 if self.controller is None else self.controller.step

    def state_dict(self) -> saved_state.GraphState | None:
        """Return plain data, with what identifies the graph; None while it is being calibrated."""
        if self.controller is None:
            return None
        return {"graph": self.captured.identity.to_dict(), **self.controller.state_dict()}

    def own_state(self, states: Sequence[saved_state.SavedGraph]) -> saved_state.SavedGraph | None:
        """Return the first of these states that is of this graph. Raises the last one's `PlanError` where none is."""
        for saved in states:
            try:
                if self.controller is not None:
                    self.controller.refuse_another(saved.state)
            except PlanError:
                if saved is states[-1]:
                    raise
            else:
                return saved
        return None

    def load_plan(self, plan: Plan) -> None:
        """Take the place of calibration and solving by a plan from a checkpoint.

        Where that fails, the graph stays as it was.
        """
        in_force = self.compiled.plan
        if in_force is None or in_force.formats != plan.formats:
            self._compile_again("for the loaded plan", plan)
        self._is_given = True

    def _compile_again(self, why: str, given: Plan | None) -> None:
        """Compile for ``given``, or solve anew. What runs is replaced on success only."""
        step = self._step
        self._take(self._compiler.anew(self.captured, given, step))
        detail = f"compiled again in {self.seconds[-1]:.1f} s, {why}"
        self._log.note("relowering", self._log.name, detail, step=step)

    def _take(self, compiled: CompiledGraph) -> None:
        """Put in force what was just compiled."""
        self.compiled, self.captured = compiled, compiled.captured
        self.seconds += (compiled.seconds,)
        plan, captured = compiled.plan, compiled.captured
        if plan is None:  # calibration, or nothing is rounded
            return
        keeper = self._keeper(compiled.scales)
        if self.controller is not None:
            self.controller.adopt(plan, keeper, captured.capacity)
            return
        rules = Rules(promote_above=self.settings.asked.promote_above, hi=self.settings.recipe.hi.name)
        self.controller = Controller(
            plan,
            rules,
            captured.capacity,
            captured.device,
            keeper=keeper,
            queue=self._compiler.queue,
            nonfinite=self._nonfinite(),
        )

    def _nonfinite(self) -> Nonfinite | None:
        action = self.settings.asked.on_nonfinite
        if action == "ignore":
            return None
        return Nonfinite(NonfiniteWatch(gradients=not isinstance(self.settings.grad_scaling, LossScaling)), action)

    def _keeper(self, scales: ScaleGraph | None) -> Keeper | None:
        scaling = self.settings.grad_scaling
        if scales is None or scaling is None:
            return None
        return keeper_of(scaling, scales, self.settings.asked.promote_above)

    def _plans_of_siblings(self) -> tuple[Plan, ...]:
        """Return the plans of training to follow, the latest last; an equal layer's is none of them."""
        training = (g for g in self._siblings if g.is_training and not g.is_replaced)
        own = (g for g in training if not g.parameters.of_another(self.parameters))
        return (*self._waiting(), *(g.plan for g in own if g.plan is not None))

    def _tell(self, notice: Notice, step: int = 0) -> None:
        self._log.tell(notice.site, notice.detail, step=step)


def _calibration(settings: Settings) -> Calibration | None:
    if settings.asked.policy != "exact":
        return None
    from fxprec.driver.calibration import Calibration

    return Calibration()


_PACKED = "{}; stored as packed codes instead: the same numbers and bytes, cast in integer arithmetic"


def _held_by(device: torch.device, settings: Settings) -> Settings:
    """Return the settings that a device can follow: packed where its code has no 8-bit dtypes."""
    has_8_bits = any(fmt.bits <= 8 for fmt in settings.recipe.formats)
    if settings.storage == "native" and has_8_bits and compat.no_native_fp8(device) is not None:
        return replace(settings, storage="packed")
    return settings
