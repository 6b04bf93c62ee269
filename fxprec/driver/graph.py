"""One graph Dynamo captured: planned, compiled, run, and lowered again when its plan changes."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule

import fxprec.runtime.arith.gemm_ops
import fxprec.runtime.cpu.ops
import fxprec.runtime.gemm.ops
import fxprec.runtime.gemm.reference_ops
import fxprec.runtime.reference_ops  # noqa: F401  all register implementations
from fxprec import compat
from fxprec.config import Settings
from fxprec.config.grad_scaling import GradScaling
from fxprec.driver import capture, saved_state
from fxprec.driver.calibration import Calibration, interpreted
from fxprec.driver.fallback import Half, Lowering, interpreted_kernels
from fxprec.driver.in_flight import InFlight, Version
from fxprec.driver.modified import Versions
from fxprec.driver.ranges import interpreted_by_group as by_group
from fxprec.driver.ranges import ranged
from fxprec.driver.saved_budget import PlanAgain, SavedBudget
from fxprec.driver.shared_code import ParameterWatch
from fxprec.driver.skip_steps import StepSkipper
from fxprec.errors import DoubleBackwardError, FallbackError, FxprecWarning
from fxprec.numerics.formats import parse
from fxprec.passes import pipeline
from fxprec.passes.analysis.joint import JointGraph
from fxprec.passes.analysis.saved_bytes import as_partitioned, copied_inputs, readable
from fxprec.passes.base import Notice, Work
from fxprec.passes.lowering import Lowered, lower
from fxprec.passes.lowering.nonfinite import keep_nonfinite
from fxprec.plan import Plan, Site
from fxprec.plan.compare import low_groups_with
from fxprec.plan.scales import ScaleGraph
from fxprec.report.folder import GraphDump
from fxprec.report.watch import run_passes, write_plan
from fxprec.runtime.controller import Controller, Rules, describe
from fxprec.runtime.events import Event
from fxprec.runtime.scaling.keeper import keeper_of

log = logging.getLogger(__name__)  # TORCH_LOGS="fxprec" shows it, "+fxprec" the passes too
Compiled = Callable[..., Any]
# Changes with what a pass may do to a graph; Inductor keys its code cache on the graphs that result anyway.
_CACHE_KEY = "fxprec-1"


@dataclass(frozen=True)
class CompileReport:
    """What compiling one graph took. ``seconds``: every compilation, the first included, then each re-lowering."""

    graph: int
    seconds: tuple[float, ...]
    passes: tuple[pipeline.PassReport, ...]  # of the latest compilation

    @property
    def passes_seconds(self) -> float:
        """Seconds the passes took in the latest compilation."""
        return sum(p.seconds for p in self.passes)


@dataclass(frozen=True)
class _Rows:
    """What compiled code does with rows of the table, and so how one half of a graph is lowered."""

    watched: frozenset[int] = frozenset()
    scaled: frozenset[int] = frozenset()
    measured: frozenset[int] = frozenset()
    counted: frozenset[int] = frozenset()


# What a compilation changes before it is known to succeed.
_TENTATIVE = (
    "_given",
    "_rows",
    "_next",
    "_seen_by_forward",
    "_num_results",
    "_copied",
    "reports",
    "is_training",
)
# Promotions that did not compile after which no more are tried: each attempt costs as much as a compilation.
MAX_GIVEN_UP = 3


class PlannedGraph:
    """The callable Dynamo gets for one captured graph.

    It keeps Dynamo's graph, so a promotion in real storage compiles again without retracing the user's code.
    ``siblings`` are the graphs compiled before it for the same model; ``waiting`` gives the plans of training graphs
    that a checkpoint has and that are not compiled yet.
    """

    def __init__(
        self,
        captured: capture.Captured,
        settings: Settings,
        siblings: Sequence[PlannedGraph],
        given: Plan | None,
        skips: StepSkipper | None = None,
        dump: GraphDump | None = None,
        *,
        portable: bool = False,
        waiting: Callable[[], tuple[Plan, ...]] = tuple,
    ) -> None:
        self.captured, self.settings, self.index = captured, _held_by(captured.device, settings), len(siblings)
        self.is_replaced = False  # by what was traced after torch.compiler.reset()
        self.controller: Controller | None = None
        self.events: list[Event] = []
        self.reports: list[pipeline.PassReport] = []
        self.compile_seconds: list[float] = []
        self.is_training = False
        self._siblings = siblings
        self._waiting = waiting
        self._given = given
        self._dump = dump
        self._portable = portable
        self._damage = Calibration() if settings.asked.policy == "exact" and given is None else None
        self._followed: Plan | None = None  # the training plan an inference graph follows
        self._in_force: Plan  # what the compiled code was lowered for
        self._rows = _Rows()
        self._next: tuple[Plan, ScaleGraph | None] | None = None  # what the compilation under way is for
        self._given_up = 0  # promotions that could not be made real
        self._seen_by_forward: frozenset[int] = frozenset()  # rows: what backward recomputes is not measured again
        self._copied: tuple[int, ...] = ()  # inputs that backward reads a stored copy of
        self._in_flight = InFlight()
        self._runs_forward = False  # whether it was called outside of backward
        self._settles_in_forward = (
            False  # whether a forward without gradients, of a reentrant checkpoint, has it settle
        )
        self._backward_id = -1
        self._is_replaying = False
        self._num_results = 0  # of the forward half, before what it saves for backward
        self._budget = SavedBudget(settings)
        self._told_bytes = 0  # above the budget
        self._damages: dict[int, float] | None = None  # by tensor, once calibrated
        self._skips = skips
        self._parameters = ParameterWatch(captured.inputs)
        if self.settings.storage != settings.storage:
            self._tell(Notice("storage='native'", _PACKED.format(compat.no_native_fp8(captured.device))))
        self._lowering = Lowering(self.settings.asked, captured.device, self._tell)
        self._compiled = self._compile(captured.examples)

    @property
    def report(self) -> CompileReport:
        return CompileReport(self.index, tuple(self.compile_seconds), tuple(self.reports))

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or None while it is being calibrated."""
        return None if self.controller is None else self.controller.plan

    def __call__(self, *args: Any) -> Any:
        if (notice := self._parameters.strangers(args)) is not None:
            self._tell(notice)
        if compat.in_backward():
            return self._recompute(args)
        self._runs_forward = True
        with compat.compile_lock:  # another thread must not promote in between
            self._begin_step()
            version = self._version()
        self._in_flight.note(version)
        return self._run(version, args)

    def _recompute(self, args: Sequence[Any]) -> Any:
        """Run inside a backward pass, for a checkpoint around the compiled code: do what its forward did.

        A reentrant checkpoint runs its forward without gradients, in another graph. This one's calls are then all
        recomputations and each is a step; what statistics ask for waits for the next forward.
        """
        if self._runs_forward or not self.is_training:
            version = self._in_flight.recomputed() or self._version()
            self._is_replaying = True
            try:
                return version(*args)
            finally:
                self._is_replaying = False
        if not self._settles_in_forward and self._backward_id != compat.backward_id():
            self._settle(steps=1)
        elif self.controller is not None:
            self.controller.step += 1
        self._backward_id = compat.backward_id()
        return self._run(self._version(), args)

    def _run(self, version: Version, args: Sequence[Any]) -> Any:
        results = version(*args)
        if self.is_training and self.controller is not None:
            _check_backward(results, Versions(self._copied, self.captured.inputs, args))
        if self._skips is not None and self.controller is not None:
            self._skips.saw(args)
        return results

    def _version(self) -> Version:
        return Version(
            self._compiled, self.captured.empty_table() if self.controller is None else self.controller.table
        )

    def _begin_step(self) -> None:
        for graph in self._siblings:
            if graph.is_training and not graph._runs_forward and graph is not self:
                graph._settles_in_forward = True
                graph._settle(steps=0)
        self._settle(steps=1)

    @property
    def _is_calibrated(self) -> bool:
        return self._damage is not None and self._damage.is_complete

    def _settle(self, *, steps: int) -> None:
        """Make what statistics ask for real, then count ``steps``: where no call recomputes an earlier one."""
        if self._is_calibrated:
            self._compile_again("solved from the calibration step", self._given)
        if self.controller is None:
            return
        self.controller.settle()
        if self._dump is not None:
            self._dump.write_stats(self.controller, step=self.controller.step)
        self.controller.step += steps
        if not self.is_training:
            self._follow_training()
        if self.controller.plan is not self._in_force:
            self.follow_plan()
        if self._lowering.is_stale:
            self._lowering.is_stale = False
            self._compile_again("without kernels that failed", self.controller.plan)

    def follow_plan(self) -> None:
        """Make a changed plan real. In ``simulate`` the table already has; real storage is lowered again.

        A promotion never ends a run: where it does not compile, what runs goes on, with a warning and an event.
        Raises `FallbackError` for that under ``strict``.
        """
        assert self.controller is not None
        if not self.settings.is_simulated and self.controller.plan.formats != self._in_force.formats:
            try:
                self._compile_again("for the changed plan", self.controller.plan)
            except Exception as error:  # whatever Inductor raises
                self._give_up(error)
        self._in_force = self.controller.plan
        if self._dump is not None:
            self._dump.write_plan(self.controller.plan)

    def _give_up(self, error: Exception) -> None:
        """Keep the code that runs and the plan it was lowered for; what was promoted since stays low, for good."""
        assert self.controller is not None
        log.info("graph %d: a promotion did not compile", self.index, exc_info=error)
        refused = self.controller.stay_with(self._in_force)
        self._given_up += 1
        last = ""
        if self._given_up == MAX_GIVEN_UP:
            self.controller.rules = replace(self.controller.rules, promote_above=None)
            last = f"; that was attempt {MAX_GIVEN_UP}, no more are made for this graph"
        site = refused[0]
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        way_out = f"hold it high from the start with keep_high=({site.module!r},)" if site.module else "see the log"
        detail = (
            f"promoting it{more} to {self.controller.rules.hi} failed ({_in_one_line(error)}): training goes on with "
            f"it in {site.format}; {way_out}{last}"
        )
        self._tell(Notice(describe(site), detail), step=self.controller.step)

    def _follow_training(self) -> None:
        """Evaluate as training runs: the same groups low, the same tensors promoted."""
        assert self.controller is not None
        trained = next((p for p in reversed(self._plans_of_siblings()) if _gemms(p) == _gemms(self._in_force)), None)
        if trained is None or trained is self._followed:
            return
        self._followed = trained
        ours = self.controller.plan
        if low_groups_with(trained, [(g.group_before, g.group_after) for g in ours.gemms]) != ours.low_groups:
            try:
                self._compile_again("to evaluate as training runs", None)
            except Exception as error:  # whatever Inductor raises
                detail = f"evaluates with other tensors low than training has: compiling failed ({_in_one_line(error)})"
                self._tell(Notice(f"graph {self.index}", detail), step=self.controller.step)
        self.controller.promote_as(trained)

    def state_dict(self) -> saved_state.GraphState | None:
        """Return plain data, with what identifies the graph; None while it is being calibrated."""
        if self.controller is None:
            return None
        return {"graph": self.captured.identity.to_dict(), **self.controller.state_dict()}

    def load_plan(self, plan: Plan) -> None:
        """Take the place of calibration and solving by a plan from a checkpoint.

        Where that fails, the graph stays as it was.
        """
        if self.controller is None or self._in_force.formats != plan.formats:
            self._compile_again("for the loaded plan", plan)

    def _compile_again(self, why: str, given: Plan | None) -> None:
        """Compile the captured graph for ``given``, or solve anew. What runs is replaced on success only."""
        before = {name: getattr(self, name) for name in _TENTATIVE}
        self._given = given
        try:
            with self.captured.tracing(), compat.backward_at_once():
                self._compiled = self._compile(self.captured.fake_examples)
        except BaseException:
            vars(self).update(before)
            raise
        step = 0 if self.controller is None else self.controller.step
        detail = f"compiled again in {self.compile_seconds[-1]:.1f} s, {why}"
        log.info("graph %d: %s", self.index, detail)
        self.events.append(Event(step, "relowering", f"graph {self.index}", detail))

    def _compile(self, examples: Sequence[Any]) -> Compiled:
        while True:
            try:
                return self._compile_once(examples)
            except PlanAgain:
                self._next = None  # what a plan above the budget set up is no longer of use

    def _compile_once(self, examples: Sequence[Any]) -> Compiled:
        start = time.perf_counter()
        gm, table = self.captured.with_table()
        with compat.uncached_autograd():
            compiled = compat.compile_fx(
                gm,
                [*examples, table],
                inner_compile=self._compile_half,
                decompositions=None if self.settings.accumulator is None else compat.whole_gemms(),
                config_patches=compat.mode_settings(self.settings.asked.mode)
                | {
                    "joint_custom_pre_pass": compat.GraphPass(self._run_passes, _CACHE_KEY),
                    "joint_custom_post_pass": compat.GraphPass(compat.keep_random_numbers, _CACHE_KEY),
                },
            )
        self._hand_over()
        self.compile_seconds.append(time.perf_counter() - start)
        return compiled  # type: ignore[no-any-return]

    def _run_passes(self, graph: Graph) -> None:
        """Plan and rewrite one joint (or inference) graph, in the middle of ``compile_fx``."""
        joint = JointGraph(graph, self.captured.inputs)
        if not joint.has_table:  # of torch.cond or a nested_compile_region: left alone, as the outer graph's passes say
            return
        self.is_training = bool(joint.tangents)
        if joint.updates_weights:
            self._leave_alone()
            return
        if self._damage is not None and not self.is_training:
            self._damage = None  # nothing to calibrate on
        work = Work(
            joint, self.settings, given=self._given, siblings=self._plans_of_siblings(), portable=self._portable
        )
        work.memory_budget = compat.memory_budget(graph)
        if self._damage is not None:
            if not self._damage.is_complete:
                pipeline.run(work, pipeline.CALIBRATION)
                return
            self._damages, self._damage = self._damage.by_tensor(), None
        work.damage = self._damages
        work.fixed_bytes, work.may_exceed_budget = self._budget.fixed, self.is_training and self._saves_codes
        self._num_results = joint.num_forward_outputs
        known = frozenset(graph.nodes)
        self.reports = run_passes(work, self._dump)
        compat.annotate_budget(graph, known)
        assert work.plan is not None
        for notice in work.notices:
            self._tell(notice)
        self._adopt(work.plan, work.scales)
        if self.is_training and not work.plan.sites and not work.plan.gemms:
            self._note_unplanned("nothing to hold low: no GEMM, and nothing of it is stored for backward")

    def _leave_alone(self) -> None:
        """No casts: a rounded second moment becomes 0, a rounded update is lost."""
        self._damage = None
        detail = "writes over weights or gradients, as an optimizer's step does: compiled as it is, nothing is rounded"
        self._note_unplanned(detail)

    def _note_unplanned(self, detail: str) -> None:
        event = Event(0, "unplanned", f"graph {self.index}", detail)
        if event not in self.events:  # a re-lowering finds the same again
            log.info("graph %d: %s", self.index, detail)
            self.events.append(event)

    def _plans_of_siblings(self) -> tuple[Plan, ...]:
        compiled = (g.plan for g in self._siblings if g.plan is not None and g.is_training and not g.is_replaced)
        return (*self._waiting(), *compiled)

    def _adopt(self, plan: Plan, scales: ScaleGraph | None) -> None:
        """Lower for a plan from here on. Raises `capture.TableFull`."""
        rows = len(plan.sites) if scales is None else scales.num_rows(len(plan.sites))
        if rows > self.captured.capacity:
            raise capture.TableFull(rows)
        scaling = self.settings.grad_scaling
        casts = frozenset() if scales is None else frozenset(scales.casts)
        measured = counted = frozenset[int]()
        if scales is not None and isinstance(scaling, GradScaling):
            measured = casts | scales.operands
            counted = casts if scaling.estimate == "histogram" else counted
        self._rows = _Rows(
            watched=casts | measured | {s.id for s in plan.sites if self._can_lose(s)},
            scaled=frozenset() if scales is None else scales.rows,
            measured=measured,
            counted=counted,
        )
        self._next = plan, scales

    def _hand_over(self) -> None:
        """Put in force what was just compiled, if it is a plan and no calibration."""
        if self._next is None:
            return
        (plan, scales), self._next = self._next, None
        scaling = self.settings.grad_scaling
        keeper = (
            None if scales is None or scaling is None else keeper_of(scaling, scales, self.settings.asked.promote_above)
        )
        self._in_force = plan
        if self.controller is not None:
            self.controller.adopt(plan, keeper)
            return
        rules = Rules(promote_above=self.settings.asked.promote_above, hi=self.settings.recipe.hi.name)
        self.controller = Controller(plan, rules, self.captured.capacity, self.captured.device, keeper=keeper)

    def _can_lose(self, site: Site) -> bool:
        """Say whether a site can overflow where hi does not, or turn a NaN into a number."""
        if self.settings.storage == "packed" and parse(site.format).nan_code is None:
            return True
        if site.direction == "backward" and parse(site.format).exponent_bits < 8:
            return True
        return site.kind != "grad_param" and site.format != self.settings.recipe.hi.name

    def _tell(self, notice: Notice, step: int = 0) -> None:
        message = f"{notice.site}: {notice.detail}"
        if self.settings.asked.strict:
            raise FallbackError(message)
        event = Event(step, "fallback", notice.site, notice.detail)
        if event not in self.events:  # a re-lowering finds the same again
            log.info("graph %d: fallback: %s", self.index, message)
            warnings.warn(message, FxprecWarning, stacklevel=2)
            self.events.append(event)

    def _compile_half(self, gm: GraphModule, examples: Sequence[Any], **options: Any) -> Compiled:
        """Lower and compile the forward or the backward graph; strip its statistics from the results."""
        if self._damage is not None:
            return self._damage.watch(gm)
        num_outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        name = "backward" if options.get("is_backward") else "forward"
        if name == "forward":
            self._seen_by_forward = frozenset()
            if self._next is not None:  # else it has no plan: it steps weights
                self._complete_plan(*self._next, gm)
            keep_nonfinite(gm.graph)  # first: what lowering is compared with keeps them too

        def build(gm: GraphModule) -> Compiled:
            if self._lowering.name == "eager":
                run = by_group(gm, interpreted(gm))
            elif self._lowering.is_interpreted:
                run = interpreted_kernels(interpreted(gm))
            else:
                run = compat.compile_fx_inner(gm, examples, **options)
            return ranged(run, f"fxprec graph {self.index} {name}")

        half = self._lowering.compile(gm, self._lower, build)
        if name == "forward":
            self._seen_by_forward = frozenset(half.lowered.rows)
        if self._dump is not None and self._lowering.name == "triton":
            plan = self._in_force if self._next is None else self._next[0]
            self._dump.write_kernels(half.lowered.generated.kernels, plan, name)
        if not half.lowered.rows:
            return half if half.has_first_run else half.run
        compat.trim_output_strides(num_outputs)
        return self._with_stats(half, num_outputs)

    def _complete_plan(self, plan: Plan, scales: ScaleGraph | None, forward: GraphModule) -> None:
        """Put into the plan what the partitioned graph really saves, and hold it to the budget."""
        if self.is_training:
            assert plan.saved_bytes is not None
            predicted = plan.saved_bytes.planned
            plan = as_partitioned(plan, forward.graph, self._num_results, self.captured.inputs)
            self._copied = copied_inputs(forward.graph, self._num_results, self.captured.inputs)
            assert plan.saved_bytes is not None
            if self._saves_codes and self._given is None:
                self._budget.hold(predicted, plan.saved_bytes.planned)
            elif self._saves_codes:
                self._tell_budget(plan.saved_bytes.planned)
        self._next = plan, scales
        log.info("graph %d: %s", self.index, summary(plan))
        write_plan(plan, self._dump)

    @property
    def _saves_codes(self) -> bool:
        """Whether a budget is held to what is saved. A simulation saves float32 carriers; its budget is of codes."""
        return not self.settings.is_simulated

    def _tell_budget(self, saved: int) -> None:
        """A plan that was given, or promoted, goes before the budget: it is said, and ends no run."""
        budget = self.settings.activation_budget
        if budget is None or saved <= max(budget, self._told_bytes):
            return
        self._told_bytes = saved
        step = 0 if self.controller is None else self.controller.step
        detail = f"{readable(saved)} are saved for backward since tensors were promoted, or as the given plan wants"
        warnings.warn(f"activation_budget {readable(budget)}: {detail}", FxprecWarning, stacklevel=2)
        self.events.append(Event(step, "fallback", f"graph {self.index}", detail))

    def _lower(self, gm: GraphModule, lowering: str, without: frozenset[str]) -> Lowered:
        return lower(
            gm,
            lowering,
            self.captured.device.type,
            watched=self._rows.watched - self._seen_by_forward,
            scaled=self._rows.scaled,
            measured=self._rows.measured,
            counted=self._rows.counted,
            calls=compat.TritonCalls(),
            without=without,
        )

    def _with_stats(self, half: Half, num_outputs: int) -> Compiled:
        def call(args: list[Any]) -> Any:
            results = half(args)
            assert self.controller is not None
            lowered = half.lowered
            if not self._is_replaying:
                self.controller.queue.push(lowered.rows, torch.cat(results[num_outputs:]), lowered.counted)
            return results[:num_outputs]

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


_PACKED = "{}; stored as packed codes instead: the same numbers and bytes, cast in integer arithmetic"


def _held_by(device: torch.device, settings: Settings) -> Settings:
    """Return the settings that a device can follow: packed where its code has no 8-bit dtypes."""
    has_8_bits = any(fmt.bits <= 8 for fmt in settings.recipe.formats)
    if settings.storage == "native" and has_8_bits and compat.no_native_fp8(device) is not None:
        return replace(settings, storage="packed")
    return settings


def _check_backward(results: Any, versions: Versions) -> None:
    """Raise `DoubleBackwardError` and `ModifiedInPlaceError` before backward runs, where the cause is in sight."""

    def check(grad: torch.Tensor) -> None:
        _check_grad_mode(grad)
        versions.check()

    for result in results if isinstance(results, list | tuple) else [results]:
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.register_hook(check)


def _check_grad_mode(grad: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise DoubleBackwardError(
            "backward(create_graph=True) went into a graph compiled by fxprec, and compiled graphs have no second "
            "derivatives; leave create_graph out, or run this part of the model uncompiled (torch.compiler.disable)"
        )


def _in_one_line(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def summary(plan: Plan) -> str:
    """Return what the plan decided, in one line."""
    low = sum(group.low for group in plan.groups)
    saved = plan.saved_bytes
    bytes_saved = "" if saved is None else f", {saved.planned} of {saved.fp32} bytes saved for backward"
    return (
        f"recipe {plan.recipe.name}, {plan.storage} storage: {low} of {len(plan.groups)} groups low, "
        f"{plan.achieved_low_ratio:.4f} of {plan.total_elements} elements, {len(plan.sites)} sites{bytes_saved}"
    )


def _gemms(plan: Plan) -> list[tuple[str, str]]:
    return [(gemm.op, gemm.module) for gemm in plan.gemms]
