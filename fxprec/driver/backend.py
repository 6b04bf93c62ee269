"""The backend object for ``torch.compile(model, backend=fxprec.Backend(config))``; see `named` for the backend name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from fxprec import compat
from fxprec.config import Config, Settings
from fxprec.config.checks import byte_size
from fxprec.config.contradictions import refuse_beside_step_budget
from fxprec.config.grad_scaling import LossScaling
from fxprec.driver import capture, saved_state
from fxprec.driver.compilation import compile_unplanned
from fxprec.driver.compiled import CompileReport
from fxprec.driver.event_log import EventLog, warn_user
from fxprec.driver.graph import PlannedGraph
from fxprec.driver.model import LayerDispatcher, Model
from fxprec.driver.option_checks import (
    following,
    tell_of_gradients_within,
    tell_of_new_versions,
    tell_of_no_effect,
    tell_of_other_options,
    want_whole_graphs,
)
from fxprec.driver.uncompiled import WATCH, Frames, Watched
from fxprec.errors import ConfigError, FxprecError, LoweringError, NonfiniteError
from fxprec.plan import Plan, shown
from fxprec.plan.edits import as_edited
from fxprec.plan.plan import saved_low_share
from fxprec.report.dump_folder import DumpFolder
from fxprec.runtime.controller import Controller, describe
from fxprec.runtime.events import Event
from fxprec.runtime.losses import Jump, LossWatch, first_that_moved
from fxprec.runtime.nonfinite import Departure
from fxprec.runtime.on_device import refuse_capture
from fxprec.runtime.scaling.skip_steps import StepSkipper
from fxprec.runtime.stats import NO_CAPTURE, steps_late

if TYPE_CHECKING:
    from fxprec.driver.record import Recorder


class Backend(Watched):
    """A ``torch.compile`` backend with its own plans, statistics and events.

    One backend serves every graph of one model: Dynamo calls the backend once per captured graph. Equal layers that are
    compiled with one backend share a capture. Each layer has its own graph, in the order of the layers' first calls.

    A ``recorder`` sees every half that runs. An ``optimizer`` of `fxprec.optim`, or a list of them, steps parameters
    during backward. A ``step_budget`` (bytes, or ``"8GiB"``) bounds weights, optimizer states and the step's peak
    together. A copy of the backend has neither optimizer nor step budget. Raises `ConfigError` for an optimizer of
    another class, for a step budget without an optimizer, for ``dump_tensors`` without a folder, and for options that
    belong into the config.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        dump: DumpFolder | None = None,
        recorder: Recorder | None = None,
        optimizer: object = None,
        step_budget: int | str | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise ConfigError(
                f"fxprec.Backend has no argument {next(iter(unknown))!r}; options belong to the config: "
                'fxprec.Backend(fxprec.Config(recipe="fp8"))'
            )
        if config is not None and not isinstance(config, Config):
            raise ConfigError(f"config is {config!r:.80}; give fxprec.Backend a fxprec.Config(...) of these options")
        WATCH.keep(self)  # here, because Dynamo may leave a frame uncompiled before it calls the backend
        self.config = config or Config()
        self._given_plan = given = None if self.config.plan is None else as_edited(Plan.load(self.config.plan))
        if given is not None:
            self.config = following(self.config, given)
        whole = byte_size("step_budget", step_budget)
        refuse_beside_step_budget(self.config, whole)
        if whole is not None:
            from fxprec.driver.step_budget import refuse_beside  # imported here: few runs need it

            refuse_beside(optimizer, self.config.peak_budget)
        self._settings = Settings.of(self.config if whole is None else replace(self.config, peak_budget=whole))
        self._log = EventLog("fxprec", strict=self.config.strict)  # events that concern no single graph
        self.frames = Frames(self._log, self._step)
        self._losses = LossWatch()
        scaling = self._settings.grad_scaling
        is_dynamic = isinstance(scaling, LossScaling) and scaling.dynamic
        self._skips = StepSkipper(lambda: self.controllers, self._log.tell) if is_dynamic else None
        folder = dump or DumpFolder.of(self.config)
        if self.config.dump_tensors and folder is None:
            raise ConfigError("dump_tensors has no folder to write to; give dump='DIR' too")
        self._model = Model(self._settings, given, self._skips, folder, recorder)
        if optimizer is not None:
            from fxprec.driver.updates import steppers_of  # imported here: few runs need it
            from fxprec.runtime.optim.in_backward import InBackward

            self._model.binding = InBackward(*steppers_of(optimizer))
            self._model.step_budget = whole
        self._graphs: Sequence[PlannedGraph] = self._model.all

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph that Dynamo captured.

        Raises `ConfigError`, `BudgetError`, `PlanError` or `LoweringError`. Dynamo passes them on unchanged.
        """
        try:
            return self._compile(gm, example_inputs)
        except FxprecError as error:
            raise compat.through_dynamo(error) from error
        except Exception as error:  # torch may raise anything
            cause = compat.unwritable_cache(error) or compat.no_compiler(error)
            if cause is None:
                raise
            raise compat.through_dynamo(LoweringError(cause)) from error

    def _compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compat.hear_resets(self)
        tell_of_new_versions(self._log)
        tell_of_no_effect(self._settings, self._log, is_planned=self._is_planned, given=self._given_plan)
        if not self._is_planned or not example_inputs:
            return compile_unplanned(gm, example_inputs, self.config)
        want_whole_graphs(self._settings)
        captured = capture.Captured.take(gm, example_inputs)
        refuse_capture(captured.device, "fxprec compiles a model", NO_CAPTURE)
        if self._settings.recipe.pure:
            captured.refuse_wide_weights(self._settings.recipe)
        if self._settings.rounds_anything:
            captured.refuse_layouts()
        tell_of_gradients_within(gm, self._log)
        tell_of_other_options(self.config, captured.identity, self._log)
        layers = LayerDispatcher(self._model, captured, example_inputs)
        captured.forget_examples()
        return layers.__call__  # a bound method: debuggers such as depyf read the code of the callable

    @property
    def _is_planned(self) -> bool:
        """Whether the options need anything that plain Inductor does not do."""
        settings = self._settings
        return (
            settings.rounds_anything
            or settings.peak_budget is not None
            or settings.asked.lowering == "eager"
            or self._model.binding is not None
            or self._model.is_given_a_peak
        )

    def backend_of(self, wrapper: object) -> Backend:
        """Return the backend that compiles for a wrapper of ``torch.compile``: always this backend."""
        return self

    @property
    def controllers(self) -> tuple[Controller, ...]:
        """The controller (plan, statistics, step) of every graph that has a plan, in compile order."""
        return tuple(graph.controller for graph in self._model.live if graph.controller is not None)

    def reset(self) -> None:
        """Drop the compiled graphs; ``torch.compiler.reset()`` calls this. A graph traced next inherits their state."""
        self.frames.compilations.at_limit.clear()
        self._model.drop()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """One plan per compiled training graph, in compile order."""
        return tuple(g.plan for g in self._model.live if g.is_training and g.plan is not None)

    @property
    def latest_plans(self) -> tuple[Plan, ...]:
        """`plans`, but for layers that were compiled for several inputs only the plan of the graph that ran last."""
        return tuple(g.plan for g in self._model.of_latest_step if g.plan is not None)

    @property
    def all_plans(self) -> tuple[Plan | None, ...]:
        """The plan of every compiled graph, inference graphs too; None for a graph that is being calibrated."""
        return tuple(g.plan for g in self._model.live)

    @property
    def compile_reports(self) -> tuple[CompileReport, ...]:
        """One report per compiled graph, in compile order: seconds, and what each pass did."""
        return tuple(g.report for g in self._graphs)

    @property
    def events(self) -> tuple[Event, ...]:
        """Promotions, scale changes, fallbacks and other events: (step, kind, site, detail), oldest first."""
        found = [event for graph in self._graphs for event in graph.events]
        return tuple(sorted([*self._log.events, *found], key=lambda e: e.step))

    @property
    def departures(self) -> tuple[Departure, ...]:
        """For each inf, NaN or loss jump: the tensor that left its range first, with statistics of 200 steps."""
        found = [departure for controller in self.controllers for departure in controller.departures]
        return tuple(sorted(found, key=lambda d: d.seen_at))

    def stats(self, *, wait: bool = True) -> list[dict[str, Any]]:
        """Return one row per site with its latest statistics. ``wait``: also wait for statistics still on the device.

        Reading has no side effect beyond what the next step would do anyway.
        """
        rows = []
        for graph in self._model.live:
            if graph.controller is not None:
                rows += [{"graph": graph.index, **row} for row in graph.controller.rows(wait=wait)]
        return rows

    @property
    def saved_low_share(self) -> float:
        """Return the share of the bytes saved for backward that is stored in fewer than 16 bits, over `latest_plans`.

        0 if no graph has a plan.
        """
        return saved_low_share(self.latest_plans)

    @property
    def mean_demoted_ratio(self) -> float:
        """Return the share of the training graphs' elements that the policy made low, averaged over steps so far.

        Elements are those of counted tensors: activations, parameters, and gradients of both, whether or not a step
        saves them. So the ratio can be 1 although some tensors are saved in 16 bits: those that are too sensitive for 8
        bits, and those that nothing reads again. `saved_low_share` reports what is saved low. A promotion lowers the
        ratio from its step on. 0 if no graph has a plan. Source: Lee et al. 2023, section 5.2.
        """
        trained = [g.controller for g in self._model.live if g.is_training and g.controller is not None]
        weights = [c.plan.total_elements * max(c.step, 1) for c in trained]
        low = sum(w * c.plan.mean_demoted_ratio(c.step) for w, c in zip(weights, trained, strict=True))
        return low / max(sum(weights), 1)

    def training_graphs(self) -> list[tuple[str, Controller, Path | None]]:
        """Return the name of each compiled training graph, its controller, and its dump folder, or None."""
        found = [(f"graph-{g.index}", g.controller, g.folder) for g in self._model.live if g.is_training]
        return [(name, controller, folder) for name, controller, folder in found if controller is not None]

    def alert(self, graph: int, site: int, rule: str, detail: str | None) -> None:
        """Note an ``"alert"`` event if a graph's site newly breaks ``rule``. ``detail`` None: it does not break it."""
        controller = self._graphs[graph].controller
        if controller is not None:
            controller.alert(site, rule, detail)

    def tell(self, site: str, detail: str) -> None:
        """Warn once of a request without effect, and note an event. Raises `FallbackError` under ``strict``."""
        self._log.tell(site, detail)

    def note_loss(self, loss: object) -> None:
        """Take the loss of the step that ran, a tensor of one element or a number, without waiting for the device.

        A later call reports a jump of the loss, with the first tensor that moved. ``on_nonfinite`` decides how: an
        event, an event and a warning, or a raised `NonfiniteError`.
        """
        if self.config.on_nonfinite == "ignore":
            return
        self._losses.note(self._step(), loss)
        late = max((steps_late(controller.device) for controller in self.controllers), default=1)
        for jump in self._losses.jumps(before=self._step() + 1 - late):
            _tell_of_jump(jump, self.controllers, self._log, self.config.on_nonfinite)

    @property
    def attention_logits(self) -> dict[str, tuple[tuple[int, float], ...]]:
        """The largest magnitude among each attention's logits, as (step, magnitude), for the latest watched steps.

        Keys are ``module, source``. Empty without ``watch_every``.
        """
        watches = (graph.compiler.numerics for graph in self._model.all)
        return {name: tuple(g.looks) for watch in watches if watch is not None for name, g in watch.logits.items()}

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[int]:
        """Run training graphs with the reference lowering and let ``recorder`` see the steps. Yield how many graphs."""
        graphs = [graph for graph in self._model.live if graph.is_training and graph.controller is not None]
        with ExitStack() as stack:
            for graph in graphs:
                stack.enter_context(graph.recorded(recorder))
            yield len(graphs)

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Count no steps and take no statistics inside the context: the calls in it are not training."""
        steps = [(controller, controller.step) for controller in self.controllers]
        with ExitStack() as stack:
            for controller, _ in steps:
                controller.catch_up()
                stack.enter_context(controller.queue.muted())
            try:
                yield
            finally:
                for controller, step in steps:
                    controller.step = step

    def stop_promoting(self) -> None:
        """Promote no tensor from now on, so that measurements see one unchanged plan."""
        for controller in self.controllers:
            controller.rules = replace(controller.rules, promote_above=None)

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps left out because a dynamic loss scale overflowed."""
        return 0 if self._skips is None else self._skips.skipped

    def refresh_scales(self) -> None:
        """Measure gradients in the next step and solve their scales again, for instance after data or loss change.

        This also happens every `GradScaling.interval` steps. With a loss scale, nothing is measured.
        """
        for controller in self.controllers:
            if controller.keeper is not None:
                controller.keeper.ask()

    def hold_operands_high(self, when: Callable[[int], bool] | None = None) -> None:
        """Multiply GEMM operands in ``hi`` instead of in blocks, from the next training step on.

        With ``when``, from the first step on for which ``when(step)`` is True; it is called as each step of each graph
        begins, with the graph's number of steps, from 1. The graph is compiled again once. `Operands.high_after` gives
        the step in advance. A saved state has the plan, not ``when``: give it again where training resumes. Raises
        `ConfigError` if the recipe rounds no operands to blocks.
        """
        self._model.high_operands.ask(when)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data: plans with their promotions, scales, and statistics that have not taken effect yet.

        Training resumes bit-identically. Calling this changes no number of the running training.

        The keys are the same before and after compilation, because ``torch.distributed.checkpoint`` requires that. The
        result includes states that were loaded for graphs that are not compiled yet.
        """
        for controller in self.controllers:
            controller.catch_up()
        return saved_state.packed(self._model.states())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, before or after compilation. Raises `PlanError` for another model's state.

        Until a training graph is compiled, evaluation follows the loaded training plans.
        """
        self._model.load(saved_state.unpacked(state))

    def summary(self) -> str:
        """Return one line: saved bytes, the peak under a budget, tensors by bits, and the code that runs uncompiled."""
        if not self._is_planned:
            return f"fxprec {self._settings.recipe.name}: nothing is rounded, and Inductor compiles as without fxprec"
        if self.frames.left and not self.plans:
            code, (what, why) = next(iter(self.frames.left.items()))
            return f"fxprec {self._settings.recipe.name}: nothing is compiled yet; {code}: {what}, {why}"
        uncompiled = [f"{code} {what}" for code, (what, _) in self.frames.left.items()]
        if len(uncompiled) > _NAMED:
            uncompiled[_NAMED:] = [f"{len(uncompiled) - _NAMED} more run or leave code uncompiled"]
        return shown.line(self.latest_plans, others=len(self.plans) - len(self.latest_plans), uncompiled=uncompiled)

    def __repr__(self) -> str:
        return f"<Backend, step {self._step()}: {self.summary()}>"

    def _repr_html_(self) -> str:
        return shown.html(self.latest_plans, f"Backend, step {self._step()}; training graphs: {len(self.plans)}")

    def _step(self) -> int:
        return max((controller.step for controller in self.controllers), default=0)

    def __reduce__(self) -> Any:
        """Copy or pickle config, plans and scales, but no code: the copy compiles again."""
        return type(self), (self.config,), self.state_dict()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.load_state_dict(state)


_NAMED = 2  # pieces of uncompiled code that the summary names
_NOBODY = (
    "no stored tensor left its usual range; check the batch and the learning rate, or watch more with "
    "on_nonfinite='report'"
)


def _tell_of_jump(jump: Jump, controllers: Sequence[Controller], log: EventLog, action: str | None) -> None:
    """Note a ``"loss-jump"`` event, warn for ``"report"``. Raises `NonfiniteError` for ``"raise"``."""
    found = first_that_moved(jump, controllers)
    if found is None:
        site, message = "loss", f"{jump}; {_NOBODY}"
    else:
        controller, departure = found
        controller.departures.append(departure)
        site, message = describe(departure.site), departure.detail
    log.note("loss-jump", site, message, step=jump.step)
    message = message if found is None else f"{site} {message}"
    if action == "raise":
        raise NonfiniteError(f"{message}; check the batch, or set on_nonfinite='report' to go on")
    if action == "report":
        warn_user(message)
