"""What runs for one captured graph: its code, and the plan, scales and statistics that the code follows.

A compilation replaces the code, on success only; the controller stays and adopts the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from fxprec.config.grad_scaling import LossScaling
from fxprec.driver import capture, saved_state
from fxprec.driver.compilation import Compiler
from fxprec.driver.compiled import CompiledGraph, CompileReport
from fxprec.driver.fallback import Lowering
from fxprec.driver.in_flight import Version
from fxprec.driver.promotions import GivenUp
from fxprec.errors import LoweringError
from fxprec.passes.analysis.peak.part import Part
from fxprec.plan import PeakBytes, Plan
from fxprec.plan.scales import ScaleGraph
from fxprec.runtime.controller import Controller, Nonfinite, Rules
from fxprec.runtime.nonfinite import NonfiniteWatch
from fxprec.runtime.scaling.keeper import Keeper, keeper_of

if TYPE_CHECKING:
    from fxprec.driver.recorder import Recorder


class InForce:
    """The code and state of the graph numbered ``index``; `compile` has to come before all else."""

    compiled: CompiledGraph

    def __init__(self, index: int, captured: capture.Captured, compiler: Compiler) -> None:
        self.index, self.captured, self.compiler = index, captured, compiler
        self.controller: Controller | None = None
        self.seconds: tuple[float, ...] = ()  # that compilations took
        self.settings, self._log = compiler.settings, compiler.log
        self._given_up = GivenUp()
        self._is_given = False  # its plan was, by a file or a checkpoint

    def compile(self, given: Plan | None, part: Part) -> None:
        """Compile for a plan, or for one to be solved within a part of the peak budget."""
        self._is_given = given is not None
        if given is None:
            self.compiler.peak.take(part)
        if self.captured.examples:  # inside of Dynamo
            self._take(self.compiler.compile(self.captured, given, self.captured.examples, 0))
        else:
            self._take(self.compiler.anew(self.captured, given, 0))

    def compile_again(self, why: str, given: Plan | None) -> None:
        """Compile for ``given``, or solve anew. What runs is replaced on success only."""
        step = self.step
        self._take(self.compiler.anew(self.captured, given, step))
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
            queue=self.compiler.queue,
            nonfinite=self._nonfinite(),
        )

    def _keeper(self, scales: ScaleGraph | None) -> Keeper | None:
        scaling = self.settings.grad_scaling
        if scales is None or scaling is None:
            return None
        return keeper_of(scaling, scales, self.settings.asked.promote_above)

    def _nonfinite(self) -> Nonfinite | None:
        action = self.settings.asked.on_nonfinite
        if action == "ignore":
            return None
        return Nonfinite(NonfiniteWatch(gradients=not isinstance(self.settings.grad_scaling, LossScaling)), action)

    @property
    def report(self) -> CompileReport:
        return CompileReport(self.index, self.seconds, self.compiled.passes)

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or None while it is being calibrated."""
        return None if self.controller is None else self.controller.plan

    @property
    def step(self) -> int:
        return 0 if self.controller is None else self.controller.step

    @property
    def version(self) -> Version:
        """Code and table for a call now."""
        table = self.captured.empty_table() if self.controller is None else self.controller.table
        return Version(self.compiled.run, table)

    def follow_plan(self, controller: Controller) -> None:
        """Make a changed plan real. In ``simulate`` the table already has; real storage is lowered again.

        A promotion never ends a run: where it does not compile, what runs goes on, with a warning and an event.
        Raises `FallbackError` for that under ``strict``.
        """
        in_force, is_in_code = self.compiled.plan, not self.settings.is_simulated
        if in_force is not None and is_in_code and controller.plan.formats != in_force.formats:
            try:
                self.compile_again("for the changed plan", controller.plan)
            except Exception as error:  # whatever Inductor raises
                self._log.notice(self._given_up.stay_with(in_force, controller, error), step=controller.step)
        self.compiled = replace(self.compiled, plan=controller.plan)
        if self.compiler.dump is not None:
            self.compiler.dump.write_plan(controller.plan)

    def load_plan(self, plan: Plan) -> Controller:
        """Take the place of calibration and solving by a plan from a checkpoint.

        Where that fails, the graph stays as it was.
        """
        in_force = self.compiled.plan
        if in_force is None or in_force.formats != plan.formats:
            self.compile_again("for the loaded plan", plan)
        self._is_given = True
        assert self.controller is not None
        return self.controller

    def state_dict(self) -> saved_state.GraphState | None:
        """Return plain data, with what identifies the graph; None while it is being calibrated."""
        if self.controller is None:
            return None
        return {"graph": self.captured.identity.to_dict(), **self.controller.state_dict()}

    @contextmanager
    def recorded(self, recorder: Recorder) -> Iterator[None]:
        """Run the reference lowering of the plan in force meanwhile, which ``recorder`` sees; training goes on.

        Raises what compiling raises, and `LoweringError` where the reference would carry other scales, or there is no
        plan yet.
        """
        controller = self.controller
        if controller is None:
            raise LoweringError(f"{self._log.name} is being calibrated and has no plan; run a step before this")
        asked = replace(self.settings.asked, lowering="eager", mode="default", verify=False)
        compiler = replace(
            self.compiler,
            settings=replace(self.settings, asked=asked),
            lowering=Lowering(asked, self.captured.device, self._log.notice),
            dump=None,
            recorder=recorder,
            tensors=None,
        )
        usual, seen = self.compiled, compiler.anew(self.captured, controller.plan, controller.step)
        if not self._carries_alike(seen, controller.keeper):
            raise LoweringError(f"{self._log.name}: the reference lowering of its plan carries other scales")
        self.compiled = replace(seen, plan=controller.plan)
        try:
            yield
        finally:
            if self.compiled.run is seen.run:  # else a promotion came, and what it compiled stays
                self.compiled = replace(usual, plan=controller.plan)

    def _carries_alike(self, seen: CompiledGraph, keeper: Keeper | None) -> bool:
        same = seen.scales is None if keeper is None else keeper.graph == seen.scales
        return same and seen.captured.capacity == self.captured.capacity

    # What `SharedPeak` asks of a training graph whose plan was made for a peak budget.

    @property
    def gradient_bytes(self) -> int:
        return self.captured.gradient_bytes

    @property
    def is_provisional(self) -> bool:
        """Whether its plan holds as little as it can, since other graphs of the step were not known."""
        return self.compiler.peak.part.is_provisional

    def peak_with_points(self) -> PeakBytes | None:
        """Return what its plan holds, and would under other budgets; None where the plan was given and stays."""
        peak = None if self.plan is None else self.plan.peak_bytes
        if peak is None or self._is_given:
            return None
        if self.compiler.peak.part.shares:  # its points tell of what waits, too
            return peak
        return self.compiler.look(self.captured, self.step)

    def take_part(self, part: Part) -> None:
        """Plan for a part of the budget and compile again, where it is new."""
        if part == replace(self.compiler.peak.part, beyond=0, beyond_waiting=0):
            return
        self.compiler.queue.forget()  # statistics of the sites that its plan had
        self.compiler.peak.take(part)
        graphs = "its step" if part.num_graphs == 1 else f"{part.num_graphs} graphs of a step"
        self.compile_again(f"within the peak budget of {graphs}", None)
