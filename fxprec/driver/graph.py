"""One graph Dynamo captured: its steps, and what other graphs of the model and statistics ask of its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxprec import compat
from fxprec.config import Settings
from fxprec.driver import capture, saved_state
from fxprec.driver.compilation import Compiler
from fxprec.driver.compiled import CompileReport
from fxprec.driver.device_settings import on_device, place_tensors, refuse_offload, unused_processor
from fxprec.driver.event_log import EventLog
from fxprec.driver.fallback import Lowering
from fxprec.driver.in_flight import InFlight, Version
from fxprec.driver.in_force import InForce
from fxprec.driver.modified import Versions, check_backward
from fxprec.driver.parameters import Parameters
from fxprec.driver.peak_budget import PeakBudget, beyond_machine
from fxprec.driver.promotions import in_one_line
from fxprec.driver.same_model import SameModel
from fxprec.driver.saved_budget import SavedBudget
from fxprec.driver.shared_peak import SharedPeak
from fxprec.driver.skip_steps import StepSkipper
from fxprec.driver.steps import Steps
from fxprec.errors import PlanError
from fxprec.passes.analysis.peak.part import Part
from fxprec.plan import Plan
from fxprec.plan.compare import low_groups_with
from fxprec.runtime.controller import Controller
from fxprec.runtime.events import Event
from fxprec.runtime.on_device import refuse_capture
from fxprec.runtime.stats import NO_CAPTURE, StatsQueue

if TYPE_CHECKING:
    from fxprec.driver.calibration import Calibration
    from fxprec.driver.recorder import Recorder
    from fxprec.driver.step_memory import StepMemory
    from fxprec.driver.tensor_dump import TensorDump
    from fxprec.report.folder import GraphDump


class PlannedGraph:
    """The callable Dynamo gets for one captured graph.

    It keeps Dynamo's graph, so a promotion in real storage compiles again without retracing the user's code.
    ``siblings`` are the graphs compiled before it for the same backend; ``waiting`` gives the plans of training graphs
    that a checkpoint has and that are not compiled yet.
    """

    def __init__(
        self,
        captured: capture.Captured,
        parameters: Parameters,
        settings: Settings,
        siblings: Sequence[PlannedGraph],
        skips: StepSkipper | None = None,
        dump: GraphDump | None = None,
        *,
        recorder: Recorder | None = None,
        waiting: Callable[[], tuple[Plan, ...]] = tuple,
        shared: SharedPeak | None = None,
    ) -> None:
        self.parameters, self.index = parameters, len(siblings)
        self.is_replaced = False  # by what was traced after torch.compiler.reset()
        self._skips, self._dump = skips, dump
        self._log = EventLog(f"graph {self.index}", strict=settings.asked.strict)
        self._model = SameModel(self, siblings, waiting)
        self._shared = SharedPeak(settings) if shared is None else shared
        self._steps, self._in_flight = Steps(), InFlight()
        held, notice = on_device(captured.device, settings)
        if notice is not None:
            self._log.notice(notice)
        if (notice := unused_processor(captured.device, held)) is not None:
            self._log.notice(notice)
        place_tensors(captured.device, held, self._log)
        if not self._is_planned_alone and (notice := beyond_machine(held, captured.device)) is not None:
            self._log.notice(notice)
        compiler = Compiler(
            settings=held,
            lowering=Lowering(settings.asked, captured.device, self._log.notice),
            budget=SavedBudget(held, self._log),
            peak=PeakBudget(self._log),
            log=self._log,
            queue=StatsQueue(),
            trained=self._model.plans,
            calibration=_calibration(settings),
            dump=dump,
            recorder=recorder,
            tensors=self._tensor_dump(held, dump),
            memory=self._step_memory(captured.device),
        )
        self._in_force = InForce(self.index, captured, compiler)

    def _tensor_dump(self, settings: Settings, dump: GraphDump | None) -> TensorDump | None:
        if not settings.asked.dump_tensors:
            return None
        from fxprec.driver.tensor_dump import tensor_dump  # here and below: what few runs want is not imported by all

        return tensor_dump(settings, dump, self._log, lambda: self.controller)

    def _step_memory(self, device: torch.device) -> StepMemory | None:
        if device.type != "cuda":
            return None
        from fxprec.driver.step_memory import StepMemory

        return StepMemory(self._log, device, lambda: None if self.plan is None else self.plan.peak_bytes)

    def compile(self, given: Plan | None) -> PlannedGraph:
        """Compile for the first time: for a plan, or for one to be solved."""
        if not self._is_planned_alone:
            refuse_offload(self.captured.device, self._in_force.settings, given)
        is_cut = self.captured.is_cut
        part = Part(is_cut=is_cut) if self._is_planned_alone else self._shared.first_part(is_cut=is_cut)
        self._in_force.compile(given, part)
        if self._dump is not None:
            self._dump.tell = lambda detail: self._log.tell("dump", detail)
        return self

    @property
    def _is_planned_alone(self) -> bool:
        return self._dump is not None and self._dump.plan_only

    @property
    def captured(self) -> capture.Captured:
        return self._in_force.captured

    @property
    def controller(self) -> Controller | None:
        return self._in_force.controller

    @property
    def report(self) -> CompileReport:
        return self._in_force.report

    @property
    def events(self) -> list[Event]:
        return [*self._log.events, *(self.controller.events if self.controller is not None else ())]

    @property
    def is_training(self) -> bool:
        return self._in_force.compiled.is_training

    @property
    def folder(self) -> Path | None:
        """Where it is dumped."""
        return None if self._dump is None else self._dump.path

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or None while it is being calibrated."""
        return self._in_force.plan

    def __call__(self, *args: Any) -> Any:
        refuse_capture(self.captured.device, "a model compiled with fxprec runs", NO_CAPTURE)
        if any(isinstance(x, compat.FakeTensor) for x in args):  # Dynamo's DDP optimizer asks for shapes: no step
            with compat.unset_fake_temporarily():  # what compiling makes is real
                return self._in_force.version(*args)
        if compat.in_backward():
            return self._recompute(args)
        self._steps.runs_forward = True
        with compat.compile_lock:  # another thread must not promote in between
            self._begin_step()
            version = self._in_force.version
        self._in_flight.note(version)
        return self._run(version, args)

    def _recompute(self, args: Sequence[Any]) -> Any:
        """Run inside a backward pass, for a checkpoint around the compiled code: do what its forward did."""
        if self._steps.runs_forward or not self.is_training:
            version = self._in_flight.recomputed() or self._in_force.version
            with self._in_force.compiler.queue.muted():
                return version(*args)
        if self._steps.settle_in_backward():
            self._settle(steps=1)
        elif self.controller is not None:
            self.controller.step += 1
        return self._run(self._in_force.version, args)

    def _run(self, version: Version, args: Sequence[Any]) -> Any:
        compiled = self._in_force.compiled
        if compiled.peak_sizes is not None and (excess := compiled.peak_sizes.excess(args)) is not None:
            self._log.tell("peak_budget", f"{excess}; give it smaller batches", step=self._in_force.step)
        results = version(*args)
        if self.controller is not None:
            if self.is_training:
                check_backward(results, Versions(compiled.copied, self.captured.inputs, args))
                if self.controller.plan.peak_bytes is not None and not compat.in_backward():
                    self._shared.saw(self._in_force, results)
            if self._skips is not None:
                self._skips.saw(args)
        return results

    def _begin_step(self) -> None:
        self._shared.begin()
        for graph in self._model.others_in_training:
            if graph._steps.settle_in_forward():
                graph._settle(steps=0)
            elif not self.is_training and graph.controller is not None:
                graph.controller.catch_up()  # evaluation follows the plan of the next step, saved in between or not
        self._settle(steps=1)

    def _settle(self, *, steps: int) -> None:
        """Make what statistics ask for real, then count ``steps``: where no call recomputes an earlier one."""
        run, compiler = self._in_force, self._in_force.compiler
        if run.compiled.is_calibration and compiler.calibration is not None and compiler.calibration.is_complete:
            run.compile_again("solved from the calibration step", None)
        controller = run.controller
        if controller is None:
            return
        controller.settle()
        if self._dump is not None:
            self._dump.write_stats(controller, step=controller.latest_step)
        self.share_promotions()
        controller.step += steps
        if not self.is_training:
            self._follow_training(controller)
        if controller.plan is not run.compiled.plan:
            run.follow_plan(controller)
        if compiler.lowering.is_stale:
            compiler.lowering.is_stale = False
            run.compile_again("without kernels that failed", controller.plan)

    def share_promotions(self) -> None:
        """Promote what other training graphs of the model have promoted."""
        if self.controller is not None and self.is_training:
            self._model.share_promotions(self.controller)

    def _follow_training(self, controller: Controller) -> None:
        """Evaluate as training runs: the same groups low, the same tensors promoted."""
        trained = self._model.to_follow(controller.plan)
        if trained is None:
            return
        borders = [(g.group_before, g.group_after) for g in controller.plan.gemms]
        if low_groups_with(trained, borders) != controller.plan.low_groups:
            try:
                self._in_force.compile_again("to evaluate as training runs", None)
            except Exception as error:  # whatever Inductor raises
                detail = f"evaluates with other tensors low than training has: compiling failed ({in_one_line(error)})"
                self._log.tell(self._log.name, detail, step=controller.step)
        controller.promote_as(trained, "promoted in training")

    @contextmanager
    def recorded(self, recorder: Recorder) -> Iterator[None]:
        """Run the reference lowering of the plan in force meanwhile, which ``recorder`` sees; training goes on."""
        with self._in_force.recorded(recorder):
            yield

    def state_dict(self) -> saved_state.GraphState | None:
        """Return plain data, with what identifies the graph; None while it is being calibrated."""
        return self._in_force.state_dict()

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

    def load_state(self, saved: saved_state.SavedGraph) -> None:
        """Go on where training was saved. Where that fails, the graph stays as it was."""
        self._in_force.load_plan(saved.plan).load_state_dict(saved.state)


def _calibration(settings: Settings) -> Calibration | None:
    if settings.asked.policy != "exact":
        return None
    from fxprec.driver.calibration import Calibration

    return Calibration()
