"""One graph Dynamo captured: planned, compiled, run, and lowered again when its plan changes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from fxprec import capture, compat
from fxprec.config import Config
from fxprec.errors import FallbackError, FxprecWarning
from fxprec.formats import parse
from fxprec.passes import pipeline
from fxprec.passes.base import Notice, Work
from fxprec.passes.joint import JointGraph
from fxprec.passes.lowering import lower
from fxprec.plan import Plan, Site
import fxprec.runtime.cpu.ops  # noqa: F401  registers the CPU kernels
from fxprec.runtime.controller import Controller, Rules
from fxprec.runtime.events import Event

Compiled = Callable[..., Any]
# Changes with what a pass may do to a graph; Inductor keys its code cache on the graphs that result anyway.
_CACHE_KEY = "fxprec-1"


class PlannedGraph:
    """The callable Dynamo gets for one captured graph.

    It keeps Dynamo's graph, so a promotion in real storage compiles again without retracing the user's code.
    """

    def __init__(self, captured: capture.Captured, config: Config, index: int, given: Plan | None) -> None:
        self.captured, self.config, self.index = captured, config, index
        self.controller: Controller | None = None
        self.events: list[Event] = []
        self.reports: list[pipeline.PassReport] = []
        self.compile_seconds: list[float] = []
        self.is_training = False
        self._watched: frozenset[int] = frozenset()
        self._scaled: frozenset[int] = frozenset()
        self._given = given
        self._compiled = self._compile(captured.examples)

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or None for a graph with nothing to plan."""
        return None if self.controller is None else self.controller.plan

    def __call__(self, *args: Any) -> Any:
        controller = self.controller
        assert controller is not None
        if controller.begin_step():
            self.follow_plan()
        return self._compiled(*args, controller.table)

    def follow_plan(self) -> None:
        """Make a changed plan real. In ``simulate`` the table already has; real storage is lowered again."""
        if self.config.storage_ == "simulate":
            return
        assert self.controller is not None
        self._given = self.controller.plan
        with self.captured.tracing():
            self._compiled = self._compile(self.captured.fake_examples)
        detail = f"compiled again in {self.compile_seconds[-1]:.1f} s for the promoted plan"
        self.events.append(Event(self.controller.step, "relowering", f"graph {self.index}", detail))

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
        work = Work(joint, self.config, given=self._given)
        self.reports = pipeline.run(work)
        assert work.plan is not None
        for notice in work.notices:
            self._tell(notice)
        self._adopt(work.plan)

    def _adopt(self, plan: Plan) -> None:
        if len(plan.sites) > self.captured.capacity:
            raise capture.TableFull(len(plan.sites))
        hi = self.config.recipe_.hi
        self._scaled = frozenset(s.id for s in plan.sites if self._is_scaled(s))
        self._watched = self._scaled | {
            s.id for s in plan.sites if s.kind != "grad_param" and s.format != hi.name
        }
        if self.controller is None:
            rules = Rules(
                promote_above=self.config.promote_above,
                scale_gradients=self.config.grad_scaling != "none",
                hi=hi.name,
            )
            self.controller = Controller(plan, rules, self.captured.capacity, self.captured.device)
        else:
            self.controller.plan = plan

    def _is_scaled(self, site: Site) -> bool:
        """A stored gradient whose format has less range than bfloat16 gets a scale."""
        narrow = parse(site.format).exponent_bits < 6
        return self.config.grad_scaling != "none" and site.kind == "grad_output" and narrow

    def _tell(self, notice: Notice) -> None:
        message = f"{notice.site}: {notice.detail}"
        if self.config.strict:
            raise FallbackError(message)
        warnings.warn(message, FxprecWarning, stacklevel=2)
        self.events.append(Event(0, "fallback", notice.site, notice.detail))

    def _compile_half(self, gm: GraphModule, examples: Sequence[Any], **options: Any) -> Compiled:
        """Lower and compile the forward or the backward graph; strip its statistics from the results."""
        num_outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        sites = lower(gm, self.config.lowering, self.captured.device.type, watched=self._watched, scaled=self._scaled)
        if self.config.lowering == "eager":
            run = _interpreted(gm)
        else:
            run = compat.compile_fx_inner(gm, examples, **options)
        if not sites:
            return run
        compat.trim_output_strides(num_outputs)
        return self._with_stats(run, sites)

    def _with_stats(self, run: Compiled, sites: tuple[int, ...]) -> Compiled:
        def call(args: list[Any]) -> Any:
            results = run(args)
            assert self.controller is not None
            self.controller.queue.push(sites, results[-1])
            return results[:-1]

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _interpreted(gm: GraphModule) -> Compiled:
    """Run a graph op by op: the reference lowering."""

    def call(args: list[Any]) -> Any:
        taken = list(args)
        args.clear()
        with torch.no_grad():
            return gm(*taken)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
