"""What ``torch.compile`` calls: ``backend=fxprec.Backend(config)``; by name, see `named`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from fxprec import compat
from fxprec.config import Config, Settings
from fxprec.config.grad_scaling import LossScaling
from fxprec.driver import capture, saved_state, uncompiled
from fxprec.driver.compiled import CompileReport
from fxprec.driver.event_log import EventLog
from fxprec.driver.graph import PlannedGraph
from fxprec.driver.loss_jumps import tell_of_jump
from fxprec.driver.model_graphs import ModelGraphs
from fxprec.driver.parameters import Parameters
from fxprec.driver.ranks import tell_of_other_options
from fxprec.driver.shared_code import Layers
from fxprec.driver.skip_steps import StepSkipper
from fxprec.errors import FxprecError, FxprecWarning, LoweringError
from fxprec.plan import Plan
from fxprec.plan.edits import as_edited
from fxprec.report.dump_folder import DumpFolder
from fxprec.runtime.controller import Controller
from fxprec.runtime.events import Event
from fxprec.runtime.losses import LossWatch
from fxprec.runtime.nonfinite import Departure
from fxprec.runtime.on_device import refuse_capture
from fxprec.runtime.stats import NO_CAPTURE, steps_late

if TYPE_CHECKING:
    from fxprec.driver.recorder import Recorder


class Backend:
    """A ``torch.compile`` backend with its own plans, statistics and events.

    One backend serves every graph of one model: Dynamo calls it once per captured graph. Equal layers that are compiled
    with one backend share a capture, and each has a graph of its own, in the order of their first calls.

    A ``recorder`` sees every half that runs.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        dump: DumpFolder | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        WATCH.keep(self)  # now: a frame may be left uncompiled before the backend is called
        self.config = config or Config()
        self._settings = Settings.of(self.config)
        self._log = EventLog("fxprec", strict=self.config.strict)  # what concerns no graph
        self.frames = uncompiled.Frames(self._log, self._step)
        self._losses = LossWatch()
        self._skips = StepSkipper(self._controllers) if _skips_steps(self._settings) else None
        self._model = ModelGraphs(
            self._settings,
            None if self.config.plan is None else as_edited(Plan.load(self.config.plan)),
            self._skips,
            dump or DumpFolder.of(self.config),
            recorder=recorder,
        )
        self._graphs: Sequence[PlannedGraph] = self._model.all

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return self._compile(gm, example_inputs)
        except FxprecError as error:
            raise compat.through_dynamo(error) from error
        except Exception as error:  # whatever torch raises
            cause = compat.unwritable_cache(error)
            if cause is None:
                raise
            raise compat.through_dynamo(LoweringError(cause)) from error

    def _compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        _tell_of_new_versions(self._log)
        _tell_what_is_missing(self._settings, self._log)
        if not self._settings.changes_anything or not example_inputs:
            result: Callable[..., Any] = compat.compile_fx(
                gm, example_inputs, config_patches=compat.mode_settings(self.config.mode)
            )
            return result
        _want_it_whole(self._settings)
        captured = capture.Captured.take(gm, example_inputs)
        refuse_capture(captured.device, "fxprec compiles a model", NO_CAPTURE)
        if self._settings.recipe.pure:
            captured.refuse_wide_weights(self._settings.recipe)
        tell_of_other_options(self.config, captured.identity, self._log)
        graph = self._model.planned(captured, Parameters(Parameters.names_of(captured.inputs), example_inputs))
        captured.forget_examples()
        layers = Layers(graph, lambda parameters: self._model.planned(graph.captured, parameters))
        return layers.__call__  # a plain callable: debuggers such as depyf look at its code

    @property
    def controllers(self) -> tuple[Controller, ...]:
        """The state of every graph that has a plan, in compile order."""
        return tuple(self._controllers())

    def _controllers(self) -> list[Controller]:
        return [graph.controller for graph in self._live if graph.controller is not None]

    @property
    def _live(self) -> list[PlannedGraph]:
        return self._model.live

    def reset(self) -> None:
        """Called by ``torch.compiler.reset()``: what is traced next takes over the state of the graph it replaces."""
        self._model.drop()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """One plan per compiled training graph, in compile order."""
        return tuple(g.plan for g in self._live if g.is_training and g.plan is not None)

    @property
    def all_plans(self) -> tuple[Plan | None, ...]:
        """The plan of every compiled graph, inference graphs too; None while it is being calibrated."""
        return tuple(g.plan for g in self._live)

    @property
    def compile_reports(self) -> tuple[CompileReport, ...]:
        """One report per compiled graph, in compile order: seconds, and what each pass did."""
        return tuple(g.report for g in self._graphs)

    @property
    def events(self) -> tuple[Event, ...]:
        """Promotions, scale changes, fallbacks: (step, kind, site, detail), oldest first."""
        found = [event for graph in self._graphs for event in graph.events]
        return tuple(sorted([*self._log.events, *found], key=lambda e: e.step))

    @property
    def departures(self) -> tuple[Departure, ...]:
        """Which tensor left its range first, each time that an inf or a NaN was seen, with 200 steps' statistics."""
        found = [departure for controller in self._controllers() for departure in controller.departures]
        return tuple(sorted(found, key=lambda d: d.seen_at))

    def stats(self, *, wait: bool = True) -> list[dict[str, Any]]:
        """One row per site with its latest statistics; waits for those still on their way, unless told not to.

        Reading acts on nothing that the next step would not act on.
        """
        rows = []
        for graph in self._live:
            if graph.controller is not None:
                rows += [{"graph": graph.index, **row} for row in graph.controller.rows(wait=wait)]
        return rows

    @property
    def mean_low_ratio(self) -> float:
        """Elements held low / all elements of the training graphs, averaged over the steps run so far.

        What the papers report: a promotion lowers it from its step on. 0 where nothing is planned.
        """
        trained = [g.controller for g in self._live if g.is_training and g.controller is not None]
        weights = [c.plan.total_elements * max(c.step, 1) for c in trained]
        low = sum(w * c.plan.mean_low_ratio(c.step) for w, c in zip(weights, trained, strict=True))
        return low / max(sum(weights), 1)

    def training_graphs(self) -> list[tuple[str, Controller, Path | None]]:
        """Return the name of each compiled training graph, its state, and the folder it is dumped to, if it is."""
        found = [(f"graph-{g.index}", g.controller, g.folder) for g in self._live if g.is_training]
        return [(name, controller, folder) for name, controller, folder in found if controller is not None]

    def alert(self, graph: int, site: int, rule: str, detail: str | None) -> None:
        """Note an ``"alert"`` event of a graph's site, where it is new that it breaks the rule; None: it does not."""
        controller = self._graphs[graph].controller
        if controller is not None:
            controller.alert(site, rule, detail)

    def tell(self, site: str, detail: str) -> None:
        """Warn, once, of what was asked for and has no effect, and note it. Raises `FallbackError` under ``strict``."""
        self._log.tell(site, detail)

    def note_loss(self, loss: Any) -> None:
        """Take the loss of the step that ran, a tensor of one element or a number, without waiting for it.

        A jump is told in a later call, with the first tensor that moved, as ``on_nonfinite`` says: an event, a warning
        too, or `NonfiniteError`.
        """
        if self.config.on_nonfinite == "ignore":
            return
        self._losses.note(self._step(), loss)
        late = max((steps_late(controller.device) for controller in self._controllers()), default=1)
        for jump in self._losses.jumps(before=self._step() + 1 - late):
            tell_of_jump(jump, self._controllers(), self._log, self.config.on_nonfinite)

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[int]:
        """Let ``recorder`` see the steps of training graphs, run by the reference lowering; give the graphs' number."""
        graphs = [graph for graph in self._live if graph.is_training and graph.controller is not None]
        with ExitStack() as stack:
            for graph in graphs:
                stack.enter_context(graph.recorded(recorder))
            yield len(graphs)

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Count no step and take no statistics meanwhile: what runs is no training."""
        steps = [(controller, controller.step) for controller in self._controllers()]
        with ExitStack() as stack:
            for controller, _ in steps:
                controller.catch_up()
                stack.enter_context(controller.queue.muted())
            yield
        for controller, step in steps:
            controller.step = step

    def stop_promoting(self) -> None:
        """Promote no tensor from now on: for measuring how a plan behaves."""
        for controller in self.controllers:
            controller.rules = replace(controller.rules, promote_above=None)

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps left out because a dynamic loss scale overflowed."""
        return 0 if self._skips is None else self._skips.skipped

    def refresh_scales(self) -> None:
        """Measure gradients in the next step and solve their scales again, as when data or loss change abruptly.

        It happens every `GradScaling.interval` steps in any case. A loss scale measures nothing.
        """
        for controller in self._controllers():
            if controller.keeper is not None:
                controller.keeper.ask()

    def state_dict(self) -> dict[str, Any]:
        """Return plain data: plans with their promotions, scales, and statistics that are not due yet.

        Training resumes bit-identically, and asking changes no number of the run that is saved.

        The keys are the same before and after compilation, as ``torch.distributed.checkpoint`` needs them. What was
        loaded for graphs that are not compiled yet is part of it.
        """
        for controller in self._controllers():
            controller.catch_up()
        return saved_state.packed(self._model.states())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take `state_dict`'s result, before or after compilation. Raises `PlanError` for another model's state.

        Until training compiles, evaluation follows the loaded training plans.
        """
        self._model.load(saved_state.unpacked(state))

    def _step(self) -> int:
        return max((controller.step for controller in self._controllers()), default=0)

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "state": self.state_dict()}

    def __setstate__(self, saved: Mapping[str, Any]) -> None:
        """A copy, or what comes out of a pickle, compiles anew: same config, and the plans and scales as they were."""
        self.__init__(saved["config"])  # type: ignore[misc]
        self.load_state_dict(saved["state"])


def _skips_steps(settings: Settings) -> bool:
    return isinstance(settings.grad_scaling, LossScaling) and settings.grad_scaling.dynamic


def _want_it_whole(settings: Settings) -> None:
    """Turn off Dynamo's DDP optimizer, with a message, where an option is about the whole graph.

    Else each bucket's piece is planned for itself, as after a graph break, and its gradients leave before the next
    piece's backward runs.
    """
    whole = [name for name in ("plan", "peak_budget", "activation_budget") if getattr(settings.asked, name) is not None]
    if not whole or not compat.widen_ddp_buckets():
        return
    warnings.warn(
        f"Dynamo's DDP optimizer is off for this graph: it cuts graphs at DDP's buckets, and {whole[0]} is about the "
        f"whole graph; gradients travel after the compiled backward pass. Leave {whole[0]} out, or compile by layer "
        "(fxprec.integrations.compile_layers) before DDP, so that buckets leave early; or set "
        "torch._dynamo.config.optimize_ddp = False to say so yourself",
        FxprecWarning,
        stacklevel=2,
    )
    raise compat.TraceAgain("fxprec plans whole graphs")


def _tell_of_new_versions(log: EventLog) -> None:
    """Warn, once a backend and also under ``strict``: most of what worked before will."""
    for line in compat.newer_than_tried():
        if log.note("untried", log.name, line):
            log.warn(line)


def _tell_what_is_missing(settings: Settings, log: EventLog) -> None:
    """Say which of the options given have no effect; under ``strict`` that is an error."""
    asked = settings.asked
    if not settings.changes_anything:
        why = (
            f"recipe {settings.recipe.name!r} holds everything in float32; choose a recipe with a low format, such as "
            "'fp8', or leave it out"
        )
        without_effect = [
            name for name in ("low_ratio", "activation_budget", "plan", "dump_tensors") if getattr(asked, name)
        ]
    else:
        why = "the plan given says what is low; leave one of them out, or edit the plan"
        chosen = {f.name: f.default for f in fields(asked) if f.name in ("policy", "keep_high", "seed")}
        without_effect = [n for n, default in chosen.items() if asked.plan and getattr(asked, n) != default]
    for name in without_effect:
        log.warn_of_loss(f"{name}={getattr(asked, name)!r} has no effect: {why}")


class StandIn:
    """What ``torch.compile`` is given in place of a `Backend`: it has one for each wrapper."""

    def backend_of(self, wrapper: object) -> Backend:
        raise NotImplementedError


def called_by(wrapper: object) -> Backend | None:
    """Return the backend that a ``torch.compile`` wrapper calls, or None where that is none of ours."""
    function = getattr(wrapper, "compiler_fn", wrapper)
    if isinstance(function, Backend):
        return function
    return function.backend_of(wrapper) if isinstance(function, StandIn) else None


def _frames_of(wrapper: object) -> uncompiled.Frames | None:
    backend = called_by(wrapper)
    return None if backend is None else backend.frames


WATCH = uncompiled.Watch(_frames_of)
