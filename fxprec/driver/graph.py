"""The callable for one captured graph: it compiles, runs and recompiles the graph, and counts its training steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxprec import compat
from fxprec.config.settings import PeakBudget
from fxprec.driver import progress
from fxprec.driver.backward import InFlight, InputVersions, Version, before_backward
from fxprec.driver.capture import Captured, Parameters
from fxprec.driver.compilation import Compiler, compile_graph, look
from fxprec.driver.compiled import Compiled, CompileReport, controller_of, keepers_of
from fxprec.driver.event_log import EventLog
from fxprec.driver.option_checks import refuse_offload
from fxprec.driver.plan_changes import PlanChanges
from fxprec.driver.saved_state import GraphState, SavedGraph
from fxprec.errors import BudgetError, LoweringError
from fxprec.passes.budget_part import BudgetPart
from fxprec.passes.notice import readable
from fxprec.plan import PeakBytes, Plan
from fxprec.plan.shown import line
from fxprec.runtime.controller import Controller
from fxprec.runtime.events import Event
from fxprec.runtime.on_device import refuse_capture
from fxprec.runtime.stats import NO_CAPTURE

if TYPE_CHECKING:
    from fxprec.driver.model import Model
    from fxprec.driver.record import Recorder
    from fxprec.driver.step_budget import StepBudget
    from fxprec.report.folder import GraphDump
    from fxprec.runtime.optim.in_backward import InBackward

log = logging.getLogger(__name__)


class PlannedGraph:
    """The callable that runs one captured graph; call `compile` before anything else.

    The object keeps Dynamo's graph, so a promotion in real storage recompiles without retracing the user's code. A
    compilation replaces ``compiled`` only if it succeeds. The controller stays the same and adopts the new plan.

    A reentrant checkpoint runs its forward without gradients, in another graph. All calls of the training graph are
    then recomputations, and each backward pass with such a call is a step. If that other graph is compiled too, its
    forwards apply the statistics.
    """

    compiled: Compiled

    def __init__(self, captured: Captured, parameters: Parameters, model: Model, dump: GraphDump | None = None) -> None:
        self.captured, self.parameters, self.index = captured, parameters, len(model.all)
        self.ran_last = 0  # the model's call count at this graph's latest forward call
        self.is_replaced = False  # by a graph that was traced after torch.compiler.reset()
        self.controller: Controller | None = None
        self._model = model
        self._log = EventLog(f"graph {self.index}", strict=model.settings.asked.strict)
        self.runs_forward = False  # whether it was called outside of backward
        self.settles_in_forward = False  # only recomputed, and settled as a forward of another graph begins
        self._backward_id = -1  # of the latest backward pass that recomputed it
        self._in_flight = InFlight()
        self._seconds: tuple[float, ...] = ()  # one per compilation
        self._is_given = False  # the plan came from a file or a checkpoint
        self._within: Callable[[Callable[[StepBudget], None]], None] | None = None  # compiles under a step budget
        self.compiler = Compiler.of(
            captured,
            model.settings,
            self._log,
            trained=lambda: model.training_plans(self),
            controller=lambda: self.controller,
            dump=dump,
            recorder=model.recorder,
        )
        self._changes = PlanChanges(self, model, self._log)

    @property
    def report(self) -> CompileReport:
        """The seconds of each compilation, and what each pass changed."""
        return CompileReport(self.index, self._seconds, self.compiled.passes)

    @property
    def events(self) -> list[Event]:
        """The events of this graph: those of compilation, then those of training."""
        return [*self._log.events, *(self.controller.events if self.controller is not None else ())]

    @property
    def is_training(self) -> bool:
        """Whether it has a backward half."""
        return self.compiled.is_training

    @property
    def folder(self) -> Path | None:
        """The folder that the graph is dumped to, or None."""
        return None if self.compiler.dump is None else self.compiler.dump.path

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or None during calibration."""
        return None if self.controller is None else self.controller.plan

    @property
    def step(self) -> int:
        """Number of training steps so far."""
        return 0 if self.controller is None else self.controller.step

    def step_in_backward(self, binding: InBackward, args: Sequence[Any]) -> None:
        """Let backward step those parameters among ``args`` that it can; call this before `compile`.

        Raises `BudgetError` if there is a step budget and a graph break cuts the step.
        """
        from fxprec.driver.updates import Updates  # imported here: few runs need it

        settings, plans_only = self.compiler.settings, self.compiler.plans_only
        updates = Updates.of(binding, self.captured.inputs, args, settings, self._log, plans_only=plans_only)
        self.compiler = replace(self.compiler, updates=updates)
        if self._model.step_budget is not None:
            from fxprec.driver.step_budget import StepBudget

            budget = StepBudget.of(self._model.step_budget, binding.optimizers, self.captured.inputs, args)
            if self._model.shared_peak.first_part(is_cut=self.captured.is_cut).is_provisional:
                raise BudgetError(
                    f"{budget.said()}; a graph break splits the step, and a step budget does not bound what its graphs "
                    "hold together; compile the model without graph breaks, or give peak_budget"
                )
            self._within = budget.first_that_fits

    def compile(self, given: Plan | None) -> None:
        """Compile for the first time, with the plan ``given``, or with a plan that the passes solve for if None."""
        if self._within is None:
            self._compile(given)
        else:
            self._within(partial(self._compile_within, given))

    def _compile_within(self, given: Plan | None, budget: StepBudget) -> None:
        """Bound the peak by the bytes that weights and optimizer states leave of the step budget, and compile."""
        settings = replace(self.compiler.settings, peak_budget=PeakBudget(budget.left))
        self.compiler = replace(self.compiler, settings=settings, whole_step=budget.for_plan, confirms=budget.is_last)
        self._compile(given)
        self._log.note(
            "memory", self._log.name, f"{budget.said()}; {readable(budget.left)} are left for the rest of the step"
        )

    def _compile(self, given: Plan | None) -> None:
        is_cut, plans_only = self.captured.is_cut, self.compiler.plans_only
        if not plans_only:
            refuse_offload(self.captured.device, self.compiler.settings, given)
        part = BudgetPart(is_cut=is_cut) if plans_only else self._model.shared_peak.first_part(is_cut=is_cut)
        self._is_given = given is not None
        if given is None:
            self.compiler.peak.set_part(part)
        self._adopt(compile_graph(self.compiler, self.captured, given, 0))
        if self.compiler.dump is not None:
            self.compiler.dump.tell = lambda detail: self._log.tell("dump", detail)

    def compile_again(self, why: str, given: Plan | None) -> None:
        """Compile with the plan ``given``, or solve again if None. The running code is replaced only on success."""
        step = self.step
        self.compiler.tried.clear()  # drop the times of an attempt that failed
        with compat.compile_lock:
            self._adopt(compile_graph(self.compiler, self.captured, given, step))
        detail = f"compiled again in {self._seconds[-1]:.1f} s, {why}"
        self._log.note("relowering", self._log.name, detail, step=step)

    def _adopt(self, compiled: Compiled) -> None:
        """Put the code and the plan in force that were just compiled."""
        is_first = not self._seconds
        plans, seconds = len(self.compiler.tried), sum(self.compiler.tried)
        self.compiler.tried.clear()
        self.compiled, self._seconds = compiled, (*self._seconds, seconds)
        if compiled.capacity != self.captured.capacity:
            self.captured = replace(self.captured, capacity=compiled.capacity)
        if compiled.plan is None:  # a calibration step, or a graph without a plan
            return
        settings = self.compiler.settings
        if self.controller is None:
            self.controller = controller_of(compiled, settings, self.captured.device, self.compiler.queue)
        else:
            keeper, copies = keepers_of(compiled, settings)
            self.controller.adopt(compiled.plan, keeper, compiled.capacity, copies)
        if self.is_training and compiled.plan.sites:
            said = line((compiled.plan,), self._log.name if self.index else "")
            tried = f", {plans} plans tried" if plans > 1 else ""
            log.info("%s; compiled in %.1f s%s", said, seconds, tried)
            if is_first:
                progress.announce(said)

    def realize(self, plan: Plan) -> None:
        """Put in force a plan that the code realizes as it is."""
        self.compiled = replace(self.compiled, plan=plan)
        if self.compiler.dump is not None:
            self.compiler.dump.write_plan(plan)

    def retire(self) -> None:
        """Release the code, because a newer graph has taken over the state."""
        self.is_replaced = True
        self.compiled = replace(self.compiled, run=None)

    def __call__(self, *args: object) -> Any:
        """Run forward, or recompute it in a checkpoint's backward. Recompile first if the statistics require it."""
        refuse_capture(self.captured.device, "a model compiled with fxprec runs", NO_CAPTURE)
        if any(isinstance(x, compat.FakeTensor) for x in args):  # Dynamo's DDP optimizer needs shapes only: no step
            with compat.unset_fake_temporarily():  # the empty scale table must be a real tensor
                return self._version(args)(*args)
        if compat.in_backward():
            return self._recompute(args)
        with self._model.lock:  # another thread must not promote in between; its compilations are not waited for
            if not self.runs_forward:
                self.runs_forward = True
                self._model.changed()
            self._begin_step()
            version = self._version(args)
        self._in_flight.note(version)
        return self._run(version, args)

    def _version(self, args: Sequence[Any]) -> Version:
        """Return what a call now runs: the code with its scale table, or the captured graph for other sizes."""
        if (assumed := self.compiled.assumes) is not None and (broken := assumed.broken_by(args)):
            why = f"its code is for sizes with {broken}; torch.compiler.reset() compiles it for others too"
            self._log.tell(self._log.name, f"runs uncompiled: {why}")
            return Version(self.captured.gm)
        compiled = self.compiled
        assert compiled.run is not None
        table = self.captured.empty_table() if self.controller is None else self.controller.table
        return Version(compiled.run, table, compiled)

    def _recompute(self, args: Sequence[Any]) -> Any:
        """Run inside a backward pass, because a checkpoint around the compiled code recomputes its forward."""
        if self.runs_forward or not self.is_training:
            version = self._in_flight.recomputed() or self._version(args)
            with self.compiler.queue.muted():
                return version(*args)
        is_first, self._backward_id = self._backward_id != compat.backward_id(), compat.backward_id()
        if is_first and not self.settles_in_forward:
            self._settle(steps=1)
        elif self.controller is not None:
            self.controller.step += 1
        return self._run(self._version(args), args)

    def _run(self, version: Version, args: Sequence[Any]) -> Any:
        compiled = version.compiled
        if compiled is None:
            return version(*args)
        if compiled.peak_sizes is not None and (excess := compiled.peak_sizes.excess(args)) is not None:
            self._log.tell("peak_budget", f"{excess}; give it smaller batches", step=self.step)
        results = version(*args)
        if self.compiler.updates is not None:
            self.compiler.updates.saw_forward(results)
        if self.controller is not None:
            if self.is_training:
                before_backward(results, InputVersions(compiled.copied, self.captured.inputs, args).check)
                if self.controller.plan.peak_bytes is not None:
                    self._model.shared_peak.saw(self, results)
                self._model.saved_together.saw(self, results)
            if self._model.skips is not None:
                self._model.skips.saw(args)
        return results

    def _begin_step(self) -> None:
        self._model.shared_peak.begin()
        self._model.calls += 1
        self.ran_last = self._model.calls
        for graph in self._model.only_recomputed:
            graph.settles_in_forward = True
            graph._settle(steps=0)
        if not self.is_training:
            for graph in self._model.training_of(self):  # to evaluate alike whether or not state was saved
                graph.finish_calibration()
                if graph.controller is not None:
                    graph.controller.catch_up()
        self._settle(steps=1)

    def _settle(self, *, steps: int) -> None:
        """Apply the statistics of earlier steps, which may recompile, then count ``steps``. Not for a recomputation."""
        self.finish_calibration()
        controller, lowering = self.controller, self.compiler.lowering
        if controller is None:
            return
        controller.settle()
        if not controller.step:
            self._model.share_scales(self)
        if self.compiler.dump is not None:
            self.compiler.dump.write_stats(controller, step=controller.latest_step)
        self._model.share_promotions(self)
        controller.step += steps
        self._changes.follow(controller)
        if lowering.is_stale:
            lowering.is_stale = False
            self.compile_again("without kernels that failed", controller.plan)

    def finish_calibration(self) -> None:
        """Plan from the calibration step and compile, if that step's backward has run."""
        calibration = self.compiler.calibration
        if self.compiled.is_calibration and calibration is not None and calibration.is_complete:
            self.compile_again("planned from the calibration step", None)

    def peak_with_points(self) -> PeakBytes | None:
        """Return the plan's peak bytes, with those under other budgets. None for a given plan or without a peak."""
        peak = None if self.plan is None else self.plan.peak_bytes
        if peak is None or self._is_given:
            return None
        if self.compiler.peak.part.shares:  # this plan already has the points of other budgets
            return peak
        return look(self.compiler, self.captured, self.step)

    def take_part(self, part: BudgetPart) -> None:
        """Plan for a part of the peak budget and recompile, unless the part is the current one."""
        if part == replace(self.compiler.peak.part, beyond=0, beyond_waiting=0):
            return
        self.compiler.queue.forget()  # the statistics of the old plan's sites
        self.compiler.peak.set_part(part)
        graphs = "its step" if part.num_graphs == 1 else f"{part.num_graphs} graphs of a step"
        self.compile_again(f"within the peak budget of {graphs}", None)

    @contextmanager
    def recorded(self, recorder: Recorder) -> Iterator[None]:
        """Run the reference lowering of the plan inside the context, and let ``recorder`` see it.

        Training steps count as usual. Raises what compiling raises, and `LoweringError` if the reference lowering has
        other scales, or if there is no plan yet.
        """
        name, controller = self._log.name, self.controller
        if controller is None:
            raise LoweringError(f"{name} is being calibrated and has no plan; run a step before this")
        seen = compile_graph(self.compiler.of_reference(recorder), self.captured, controller.plan, controller.step)
        if seen.scales != controller.scales or seen.capacity != self.captured.capacity:
            raise LoweringError(f"{name}: the reference lowering of its plan carries other scales")
        usual, self.compiled = self.compiled, replace(seen, plan=controller.plan)
        try:
            yield
        finally:
            if self.compiled.run is seen.run:  # otherwise a promotion compiled new code, which stays
                self.compiled = replace(usual, plan=self.plan)

    def state_dict(self) -> GraphState | None:
        """Return plain data, with the graph's identity; None before the calibration step has measured."""
        self.finish_calibration()  # as the next step would: a resumed run measures nothing
        if self.controller is None:
            return None
        return {"graph": self.captured.identity.to_dict(), **self.controller.state_dict()}

    def load_state(self, saved: SavedGraph) -> None:
        """Continue from a saved state: the saved plan replaces calibration and solving.

        If recompiling for the saved plan fails, the graph stays as it was.
        """
        in_force = self.compiled.plan
        wanted = saved.plan.formats, saved.plan.operand_formats
        if in_force is None or (in_force.formats, in_force.operand_formats) != wanted:
            self.compile_again("for the loaded plan", saved.plan)
        self._is_given = True
        assert self.controller is not None
        self.controller.load_state_dict(saved.state)
