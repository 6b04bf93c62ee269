"""Compiling one captured graph: the passes run in the middle of ``compile_fx``, then each half is lowered."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Graph, GraphModule, Node

import fxprec.runtime.arith.gemm_ops
import fxprec.runtime.cpu.blocks
import fxprec.runtime.cpu.ops
import fxprec.runtime.gemm.ops
import fxprec.runtime.gemm.reference_ops
import fxprec.runtime.reference_blocks
import fxprec.runtime.reference_ops  # noqa: F401  all register implementations
from fxprec import compat
from fxprec.config import Settings
from fxprec.driver.calibration import Calibration
from fxprec.driver.capture import Captured
from fxprec.driver.compiled import CompiledGraph, Planned, rows_of
from fxprec.driver.compiled_peak import CompiledPeak
from fxprec.driver.event_log import EventLog, Said
from fxprec.driver.fallback import Compiled, Lowering
from fxprec.driver.halves import CompiledHalf, Halves, range_name, with_stats
from fxprec.driver.memory_ratio import over_ratio
from fxprec.driver.peak_budget import Looked, PeakBudget
from fxprec.driver.ranges import ranged
from fxprec.driver.recorder import Recorder
from fxprec.driver.saved_budget import PlanAgain, SavedBudget
from fxprec.driver.tensor_dump import TensorDump
from fxprec.driver.warm_start import KnownGraph, KnownHalf, plan_key, say_again, sources
from fxprec.passes import pipeline
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.joint import JointGraph
from fxprec.passes.analysis.peak.other_sizes import OtherSizes
from fxprec.passes.analysis.saved_bytes import (
    as_partitioned,
    copied_inputs,
    partitioned_size,
    read_by_backward,
    readable,
)
from fxprec.passes.analysis.sizes import budget_note, ranges_of
from fxprec.passes.base import Work
from fxprec.passes.guide_partition import copy_written_inputs, forget_order
from fxprec.passes.lowering.nonfinite import keep_nonfinite
from fxprec.passes.lowering.triton import Generated
from fxprec.plan import PeakBytes, Plan
from fxprec.report.folder import GraphDump
from fxprec.report.watch import run_passes, write_plan
from fxprec.runtime.stats import StatsQueue

log = logging.getLogger(__name__)  # TORCH_LOGS="fxprec" shows it, "+fxprec" the passes too


class _TableFull(Exception):
    """The plan wants more rows than the table has."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """What all compilations of one graph share."""

    settings: Settings
    lowering: Lowering
    budget: SavedBudget
    peak: PeakBudget
    log: EventLog
    queue: StatsQueue
    """Takes the statistics of what is compiled."""
    trained: Callable[[], tuple[Plan, ...]]
    """Gives the plans of the model's training graphs, the latest last."""
    calibration: Calibration | None
    dump: GraphDump | None
    portable: bool
    recorder: Recorder | None = None
    tensors: TensorDump | None = None

    def compile(self, captured: Captured, given: Plan | None, examples: Sequence[Any], step: int) -> CompiledGraph:
        """Compile for a plan, or solve one. What a first plan saves, and how many rows it takes, may ask for another.

        ``step`` is the one events are noted for.
        """
        key = self._key(captured, given)
        while True:
            attempt = Compilation(self, captured, given, step, key)
            try:
                return attempt.compile(examples)
            except PlanAgain:
                continue
            except _TableFull as full:
                captured = captured.with_room_for(full.rows)

    def _key(self, captured: Captured, given: Plan | None) -> str | None:
        """Return what the code can be stored under; None where it cannot, or someone looks on as it is compiled."""
        watchers = (self.dump, self.recorder, self.calibration, self.tensors)
        if any(w is not None for w in watchers) or compat.traces_artifacts() or not self.lowering.makes_code:
            return None
        held = self.settings.peak_budget is not None or (given is not None and given.peak_bytes is not None)
        if callable(self.settings.asked.policy) or held:  # a plan held to its peak may be refused once it is compiled
            return None
        more = (self.portable, self.budget.fixed, self.lowering.name, sorted(self.lowering.without))
        return plan_key(self.settings, captured, given, self.trained(), more)

    def look(self, captured: Captured, step: int) -> PeakBytes | None:
        """Return what the passes find of other peak budgets, and compile nothing."""
        part = self.peak.part
        self.peak.part, self.peak.only_looks = replace(part, wants_curve=True), True
        try:
            self.anew(captured, None, step)
        except Looked as looked:
            return looked.peak
        finally:
            self.peak.part, self.peak.only_looks = part, False
        return None

    def anew(self, captured: Captured, given: Plan | None, step: int) -> CompiledGraph:
        """Compile again, outside of Dynamo."""
        with captured.tracing(), compat.backward_at_once():
            return self.compile(captured, given, captured.fake_examples, step)


@dataclass
class Compilation:
    """One attempt. The backward half may be compiled in the first backward pass only, and finds here what it needs."""

    compiler: Compiler
    captured: Captured
    given: Plan | None
    step: int
    key: str | None
    """What the code is stored under; None: it is not."""
    planned: Planned | None = None
    is_training: bool = False
    is_calibration: bool = False
    saves_memory: bool = False  # the user has tensors computed again
    ratio: tuple[float, int] | None = None  # torch's activation_memory_budget, and the bytes it is a share of
    passes: tuple[pipeline.PassReport, ...] = ()
    policies: Mapping[Node, Any] = field(default_factory=dict)  # what the partition is told of each node
    copied: tuple[int, ...] = ()
    peak_sizes: OtherSizes | None = None
    halves: Halves | None = None  # once the plan is complete
    said: list[Said] = field(default_factory=list)  # by the passes
    is_traced: bool = False  # not found in the cache
    found: list[KnownHalf] = field(default_factory=list)  # in the cache

    def compile(self, examples: Sequence[Any]) -> CompiledGraph:
        """Raises `PlanAgain` and `_TableFull` for another attempt, and whatever Inductor raises."""
        start = time.perf_counter()
        gm, table = self.captured.with_table()
        settings = self.compiler.settings
        with compat.stored_autograd(self._load if self.key else None), self._whole_step():
            run = compat.compile_fx(
                gm,
                [*examples, table],
                inner_compile=self._compile_half,
                decompositions=None if settings.accumulator is None else compat.whole_gemms(),
                config_patches=compat.mode_settings(settings.asked.mode)
                | (compat.ROUNDED_AT_EVERY_OPERATOR if settings.recipe.pure else {})
                | {
                    "joint_custom_pre_pass": compat.GraphPass(self._run_passes, self.key or sources()),
                    "joint_custom_post_pass": compat.GraphPass(self._after_torchs_passes, sources()),
                },
            )
        self._hold_peak()
        if not self.is_traced:
            self._take_known()
        return CompiledGraph(
            run=run,
            captured=self.captured,
            plan=None if self.planned is None else self.planned.plan,
            scales=None if self.planned is None else self.planned.scales,
            is_training=self.is_training,
            is_calibration=self.is_calibration,
            copied=self.copied,
            passes=self.passes,
            seconds=time.perf_counter() - start,
            peak_sizes=self.peak_sizes,
        )

    def _whole_step(self) -> contextlib.AbstractContextManager[None]:
        """Compile both halves now where a budget binds them together, or the plan says how each is lowered."""
        asked = self.compiler.settings.peak_budget if self.given is None else self.given.peak_bytes
        chooser = self.compiler.lowering.chooser
        chooses = chooser is not None and chooser.why_inductor() is None
        return compat.backward_at_once() if asked is not None or chooses else contextlib.nullcontext()

    def _hold_peak(self) -> None:
        """Put into the plan what the compiled halves hold at their peak, and hold them to the budget."""
        if self.halves is None or self.halves.peak is None or self.planned is None:
            return
        plan, found = self.planned.plan, self.halves.peak
        assert plan.peak_bytes is not None
        if found.bytes is None:
            if found.unread:
                self._add_note(f"peak budget: not compared with what is compiled: {found.unread}")
            return
        peak = self.compiler.peak
        held = (
            peak.hold(plan.peak_bytes, found.bytes, found.waiting)
            if self.given is None
            else peak.tell(plan.peak_bytes, found.bytes, self.step)
        )
        self.planned = replace(self.planned, plan=replace(plan, peak_bytes=held))
        write_plan(self.planned.plan, self.compiler.dump)

    def _add_note(self, note: str) -> None:
        assert self.planned is not None
        plan = self.planned.plan
        self.planned = replace(self.planned, plan=replace(plan, notes=(*plan.notes, note)))

    def _run_passes(self, graph: Graph) -> None:
        with self.compiler.log.heard() as said:
            self._rewrite(graph)
        self.said += said

    def _rewrite(self, graph: Graph) -> None:
        """Plan and rewrite one joint (or inference) graph."""
        joint = JointGraph(graph, self.captured.inputs)
        if not joint.has_table:  # of torch.cond or a nested_compile_region: left alone, as the outer graph's passes say
            return
        self.is_training = bool(joint.tangents)
        if joint.updates_weights:
            self._note_unplanned(_STEPS_WEIGHTS)
            return
        work = self._work(joint)
        if self.is_training and self.given is None and (calibration := self.compiler.calibration) is not None:
            if not calibration.is_complete:
                self.is_calibration = True
                pipeline.run(work, pipeline.CALIBRATION)
                return
            work.damage = calibration.by_tensor()
        known = frozenset(graph.nodes)
        self.saves_memory = self.is_training and (work.memory_budget < 1 or regions.are_in(graph) or work.fits_peak)
        self.passes = tuple(run_passes(work, self.compiler.dump))
        if self.compiler.peak.only_looks:
            raise Looked(work.peak)
        if self.compiler.tensors is not None:
            self.compiler.tensors.expect(graph)
        compat.annotate_budget(graph, known)
        self.policies = regions.policies(graph)
        if work.memory_budget < 1 and self.is_training:
            self.ratio = work.memory_budget, read_by_backward(joint)
        for notice in work.notices:
            self.compiler.log.tell(notice.site, notice.detail)
        self._take(work)

    def _after_torchs_passes(self, graph: Graph) -> None:
        regions.restore(self.policies)
        self.policies = {}
        copy_written_inputs(graph)
        compat.keep_random_numbers(graph)

    def _work(self, joint: JointGraph) -> Work:
        return Work(
            joint,
            self.compiler.settings,
            given=self.given,
            siblings=self.compiler.trained(),
            portable=self.compiler.portable,
            memory_budget=compat.memory_budget(joint.graph),
            fixed_bytes=self.compiler.budget.fixed,
            peak_part=self.compiler.peak.part,
            looks_at_budgets=self.compiler.dump is not None,
            may_exceed_budget=self.is_training and self._saves_codes,
        )

    def _take(self, work: Work) -> None:
        plan, scales, self.peak_sizes = work.plan, work.scales, work.peak_sizes
        assert plan is not None
        rows = len(plan.sites) if scales is None else scales.num_rows(len(plan.sites))
        if rows > self.captured.capacity:
            raise _TableFull(rows)
        watched = rows_of(plan, scales, self.compiler.settings)
        self.planned = Planned(plan, scales, watched, work.joint.num_forward_outputs)
        if self.is_training and not plan.sites and not plan.gemms:
            self._note_unplanned("nothing to hold low: no GEMM, and nothing of it is stored for backward")

    def _note_unplanned(self, detail: str) -> None:
        self.compiler.log.note("unplanned", self.compiler.log.name, detail)

    def _compile_half(self, gm: GraphModule, examples: Sequence[Any], **options: Any) -> Compiled:
        """Lower and compile the forward or the backward graph; strip its statistics from the results."""
        self.is_traced = True
        if self.is_calibration:
            assert self.compiler.calibration is not None
            return self.compiler.calibration.watch(gm)
        name = "backward" if options.get("is_backward") else "forward"
        with self.compiler.log.heard() as said:
            forget_order(gm.graph)
            if name == "forward":
                self._complete_plan(gm)
                keep_nonfinite(gm.graph)  # first: what lowering is compared with keeps them too
                self.halves = self._new_halves()
            assert self.halves is not None, "forward comes first"
            half = self.halves.compile(gm, examples, options, name)
            self._say_how_lowered()
        if self.key is None:
            return half.run
        return compat.storable(half.run, self._known(half, name, said), half.code)

    def _say_how_lowered(self) -> None:
        """Put into the plan which lowering was estimated to be less for the halves so far."""
        chooser, planned = self.compiler.lowering.chooser, self.planned
        if chooser is not None and chooser.halves and planned is not None:
            self.planned = replace(planned, plan=replace(planned.plan, lowering=chooser.for_plan()))
            write_plan(self.planned.plan, self.compiler.dump)

    def _known(self, half: CompiledHalf, name: str, said: Sequence[Said]) -> KnownHalf:
        said = (*self.said, *said) if name == "forward" else tuple(said)
        lowered = replace(half.lowered, generated=Generated())  # kernels are part of the code
        return KnownHalf(name, lowered, half.num_outputs, said, KnownGraph(self.planned, self.is_training, self.copied))

    def _load(self, known: KnownHalf, run: Compiled) -> Compiled:
        """Say how a half runs that the cache has."""
        self.found.append(known)
        compiler = self.compiler
        run = ranged(run, range_name(compiler.log.name, known.name))
        return with_stats(run, known.lowered, known.num_outputs, compiler.queue)

    def _take_known(self) -> None:
        """Take over what was found out when the halves in the cache were compiled."""
        known = self.found[-1].graph  # backward's knows how both were lowered
        self.planned, self.is_training, self.copied = known.planned, known.is_training, known.copied
        for half in self.found:
            say_again(self.compiler.log, half.said, self.step)
        if self.planned is not None:
            log.info("%s: from the cache: %s", self.compiler.log.name, summary(self.planned.plan))

    def _new_halves(self) -> Halves:
        compiler, device = self.compiler, self.captured.device
        if compiler.recorder is not None:
            compiler.recorder.inputs[compiler.log.name] = self.captured.inputs
        return Halves(
            compiler.log.name,
            compiler.lowering,
            compiler.queue,
            compiler.dump,
            device.type,
            self.planned,
            saves_memory=self.saves_memory,
            recorder=compiler.recorder,
            tensors=compiler.tensors if self.is_training else None,
            peak=self._new_peak(),
        )

    def _new_peak(self) -> CompiledPeak | None:
        planned = self.planned
        return None if planned is None or planned.plan.peak_bytes is None else CompiledPeak(planned.num_results)

    def _complete_plan(self, forward: GraphModule) -> None:
        """Put into the plan what the partitioned graph really saves, and hold it to the budget."""
        if self.planned is None:  # it steps weights
            return
        plan, num_results = self.planned.plan, self.planned.num_results
        if self.is_training:
            predicted = plan.saved_bytes
            plan = as_partitioned(plan, forward.graph, num_results, self.captured.inputs)
            self.copied = copied_inputs(forward.graph, num_results, self.captured.inputs)
            assert predicted is not None
            assert plan.saved_bytes is not None
            if self._saves_codes and self.given is None:
                self.compiler.budget.hold(predicted.planned, plan.saved_bytes.planned)
            elif self._saves_codes:
                self.compiler.budget.tell(plan.saved_bytes.planned, self.step)
            self._tell_of_ratio(plan.saved_bytes.planned, forward.graph, num_results)
            plan = self._with_budget_note(plan, forward.graph)
        chooser = self.compiler.lowering.chooser
        plan = replace(plan, lowering=None if chooser is None else chooser.for_plan())
        self.planned = replace(self.planned, plan=plan)
        log.info("%s: %s", self.compiler.log.name, summary(plan))
        write_plan(plan, self.compiler.dump)

    def _tell_of_ratio(self, saved: int, forward: Graph, num_results: int) -> None:
        if self.ratio is None:
            return
        notice = over_ratio(*self.ratio, saved, forward, num_results)
        if notice is not None:
            self.compiler.log.tell(notice.site, notice.detail, step=self.step)

    def _with_budget_note(self, plan: Plan, forward: Graph) -> Plan:
        """Say in the plan for which sizes the budget holds, where not for all that the guards allow."""
        budget = plan.activation_budget
        if budget is None or self.planned is None or self.given is not None or not self._saves_codes:
            return plan
        size = partitioned_size(forward, self.planned.num_results)
        note = budget_note(budget, readable(budget), size, ranges_of(forward))
        if note is None:
            return plan
        if note.is_broken:
            self.compiler.log.tell(self.compiler.log.name, note.text, step=self.step)
        return replace(plan, notes=(*plan.notes, note.text))

    @property
    def _saves_codes(self) -> bool:
        """Whether a budget is held to what is saved. A simulation saves float32 carriers; its budget is of codes."""
        return not self.compiler.settings.is_simulated


# A rounded second moment becomes 0, a rounded update is lost.
_STEPS_WEIGHTS = "writes over weights or gradients, as an optimizer's step does: compiled as it is, nothing is rounded"


def summary(plan: Plan) -> str:
    """Return what the plan decided, in one line."""
    low = sum(group.low for group in plan.groups)
    saved = plan.saved_bytes
    bytes_saved = "" if saved is None else f", {saved.planned} of {saved.fp32} bytes saved for backward"
    return (
        f"recipe {plan.recipe.name}, {plan.storage} storage: {low} of {len(plan.groups)} groups low, "
        f"{plan.achieved_low_ratio:.4f} of {plan.total_elements} elements, {len(plan.sites)} sites{bytes_saved}"
    )
