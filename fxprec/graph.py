"""One graph Dynamo captured: planned, compiled, run, and lowered again when its plan changes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule

import fxprec.runtime.cpu.ops
import fxprec.runtime.reference_ops  # noqa: F401  both register implementations
from fxprec import capture, compat
from fxprec.calibration import Calibration, interpreted
from fxprec.config import Config, GradScaling
from fxprec.errors import FallbackError, FxprecWarning
from fxprec.formats import parse
from fxprec.passes import pipeline
from fxprec.passes.base import Notice, Work
from fxprec.passes.joint import JointGraph
from fxprec.passes.lowering import lower
from fxprec.plan import Plan, Site
from fxprec.runtime.controller import Controller, Rules
from fxprec.runtime.events import Event

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


class PlannedGraph:
    """The callable Dynamo gets for one captured graph.

    It keeps Dynamo's graph, so a promotion in real storage compiles again without retracing the user's code.
    ``siblings`` are the graphs compiled before it for the same model.
    """

    def __init__(
        self, captured: capture.Captured, config: Config, siblings: Sequence[PlannedGraph], given: Plan | None
    ) -> None:
        self.captured, self.config, self.index = captured, config, len(siblings)
        self.controller: Controller | None = None
        self.events: list[Event] = []
        self.reports: list[pipeline.PassReport] = []
        self.compile_seconds: list[float] = []
        self.is_training = False
        self._siblings = siblings
        self._given = given
        self._damage = Calibration() if config.policy == "exact" and given is None else None
        self._followed: Plan | None = None  # the training plan an inference graph follows
        self._in_force: Plan  # what the compiled code was lowered for
        self._watched: frozenset[int] = frozenset()
        self._scaled: frozenset[int] = frozenset()
        self._compiled = self._compile(captured.examples)

    @property
    def report(self) -> CompileReport:
        return CompileReport(self.index, tuple(self.compile_seconds), tuple(self.reports))

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or None while it is being calibrated."""
        return None if self.controller is None else self.controller.plan

    def __call__(self, *args: Any) -> Any:
        if self._damage is not None and self._damage.is_complete:
            self._compile_again("solved from the calibration step")
        if self.controller is None:
            return self._compiled(*args, self.captured.empty_table())
        self.controller.begin_step()
        if not self.is_training:
            self._follow_training()
        if self.controller.plan is not self._in_force:
            self.follow_plan()
        return self._compiled(*args, self.controller.table)

    def follow_plan(self) -> None:
        """Make a changed plan real. In ``simulate`` the table already has; real storage is lowered again."""
        assert self.controller is not None
        if self.config.storage_ != "simulate" and self.controller.plan.formats != self._in_force.formats:
            self._given = self.controller.plan
            self._compile_again("for the changed plan")
        self._in_force = self.controller.plan

    def _follow_training(self) -> None:
        """Evaluate as training runs: the same groups low, the same tensors promoted."""
        assert self.controller is not None
        trained = next((p for p in reversed(self._plans_of_siblings()) if _gemms(p) == _gemms(self._in_force)), None)
        if trained is None or trained is self._followed or self.config.plan is not None:
            return
        self._followed = trained
        if trained.low_groups != self.controller.plan.low_groups:
            self._given = None
            self._compile_again("to evaluate as training runs")
        self.controller.promote_as(trained)

    def load_plan(self, plan: Plan) -> None:
        """Take the place of calibration and solving by a plan from a checkpoint."""
        self._given = plan
        if self.controller is None or self._in_force.formats != plan.formats:
            self._compile_again("for the loaded plan")

    def _compile_again(self, why: str) -> None:
        with self.captured.tracing():
            self._compiled = self._compile(self.captured.fake_examples)
        step = 0 if self.controller is None else self.controller.step
        detail = f"compiled again in {self.compile_seconds[-1]:.1f} s, {why}"
        self.events.append(Event(step, "relowering", f"graph {self.index}", detail))

    def _compile(self, examples: Sequence[Any]) -> Compiled:
        start = time.perf_counter()
        gm, table = self.captured.with_table()
        with compat.uncached_autograd():
            compiled = compat.compile_fx(
                gm,
                [*examples, table],
                inner_compile=self._compile_half,
                config_patches={"joint_custom_pre_pass": compat.GraphPass(self._run_passes, _CACHE_KEY)},
            )
        self.compile_seconds.append(time.perf_counter() - start)
        return compiled  # type: ignore[no-any-return]

    def _run_passes(self, graph: Graph) -> None:
        """Plan and rewrite one joint (or inference) graph, in the middle of ``compile_fx``."""
        joint = JointGraph(graph, self.captured.inputs)
        self.is_training = bool(joint.tangents)
        if self._damage is not None and not self.is_training:
            self._damage = None  # nothing to calibrate on
        work = Work(joint, self.config, given=self._given, siblings=self._plans_of_siblings())
        if self._damage is not None:
            if not self._damage.is_complete:
                pipeline.run(work, pipeline.CALIBRATION)
                return
            work.damage, self._damage = self._damage.by_tensor(), None
        self.reports = pipeline.run(work)
        assert work.plan is not None
        for notice in work.notices:
            self._tell(notice)
        self._adopt(work.plan)

    def _plans_of_siblings(self) -> tuple[Plan, ...]:
        return tuple(g.plan for g in self._siblings if g.plan is not None and g.is_training)

    def _adopt(self, plan: Plan) -> None:
        if len(plan.sites) > self.captured.capacity:
            raise capture.TableFull(len(plan.sites))
        hi = self.config.recipe_.hi.name
        self._scaled = frozenset(s.id for s in plan.sites if self._is_scaled(s))
        self._watched = self._scaled | {s.id for s in plan.sites if self._can_lose(s)}
        self._in_force = plan
        if self.controller is None:
            scales = self.config.grad_scaling
            rules = Rules(
                promote_above=self.config.promote_above,
                scale_gradients=scales != "none",
                interval=scales.interval if isinstance(scales, GradScaling) else Rules.interval,
                underflow=scales.underflow if isinstance(scales, GradScaling) else Rules.underflow,
                hi=hi,
            )
            self.controller = Controller(plan, rules, self.captured.capacity, self.captured.device)
        else:
            self.controller.plan = plan

    def _is_scaled(self, site: Site) -> bool:
        """A stored gradient whose format has less range than bfloat16 gets a scale."""
        narrow = parse(site.format).exponent_bits < 6
        return self.config.grad_scaling != "none" and site.kind == "grad_output" and narrow

    def _can_lose(self, site: Site) -> bool:
        """Say whether a site can overflow where hi does not, or turn a NaN into a number."""
        if self.config.storage_ == "packed" and parse(site.format).nan_code is None:
            return True
        return site.kind != "grad_param" and site.format != self.config.recipe_.hi.name

    def _tell(self, notice: Notice) -> None:
        message = f"{notice.site}: {notice.detail}"
        if self.config.strict:
            raise FallbackError(message)
        event = Event(0, "fallback", notice.site, notice.detail)
        if event not in self.events:  # a re-lowering finds the same again
            warnings.warn(message, FxprecWarning, stacklevel=2)
            self.events.append(event)

    def _compile_half(self, gm: GraphModule, examples: Sequence[Any], **options: Any) -> Compiled:
        """Lower and compile the forward or the backward graph; strip its statistics from the results."""
        if self._damage is not None:
            return self._damage.watch(gm)
        num_outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        sites = lower(gm, self.config.lowering, self.captured.device.type, watched=self._watched, scaled=self._scaled)
        eager = self.config.lowering == "eager"
        run = interpreted(gm) if eager else compat.compile_fx_inner(gm, examples, **options)
        if not sites:
            return run
        compat.trim_output_strides(num_outputs)
        return self._with_stats(run, num_outputs, sites)

    def _with_stats(self, run: Compiled, num_outputs: int, sites: tuple[int, ...]) -> Compiled:
        def call(args: list[Any]) -> Any:
            results = run(args)
            assert self.controller is not None
            self.controller.queue.push(sites, torch.cat(results[num_outputs:]))
            return results[:num_outputs]

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _gemms(plan: Plan) -> list[tuple[str, str]]:
    return [(gemm.op, gemm.module) for gemm in plan.gemms]
