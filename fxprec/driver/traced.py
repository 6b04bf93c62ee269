"""One attempt to compile a captured graph that the cache has no code of: passes run, then each half is lowered.

Imported only then: a start from the cache needs no pass.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch.fx import Graph, GraphModule, Node

from fxprec import compat
from fxprec.driver.capture import Captured
from fxprec.driver.compiled import CompiledGraph, Planned, TableFull, rows_of
from fxprec.driver.compiled_peak import CompiledPeak
from fxprec.driver.event_log import Said
from fxprec.driver.fallback import Compiled
from fxprec.driver.halves import CompiledHalf, Halves
from fxprec.driver.memory_ratio import over_ratio
from fxprec.driver.peak_budget import Looked
from fxprec.driver.warm_start import KnownGraph, KnownHalf
from fxprec.passes import pipeline
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.joint import JointGraph
from fxprec.passes.analysis.peak.other_sizes import OtherSizes
from fxprec.passes.analysis.peak.step import drawn
from fxprec.passes.analysis.saved_bytes import as_partitioned, copied_inputs, partitioned_size, read_by_backward
from fxprec.passes.analysis.sizes import budget_note, ranges_of
from fxprec.passes.base import Work
from fxprec.passes.casts.upsampled import sum_upsampled
from fxprec.passes.guide_partition import copy_written_inputs, forget_order
from fxprec.passes.lowering.lowered import Generated
from fxprec.passes.lowering.nonfinite import keep_nonfinite
from fxprec.passes.notice import readable
from fxprec.passes.pass_report import PassReport
from fxprec.plan import Plan
from fxprec.report.watch import run_passes, write_plan

if TYPE_CHECKING:
    from fxprec.driver.calibration import Calibration
    from fxprec.driver.compilation import Compiler

log = logging.getLogger(__name__)


@dataclass
class Traced:
    """The backward half may be compiled in the first backward pass only, and finds here what it needs."""

    compiler: Compiler
    captured: Captured
    given: Plan | None
    step: int
    key: str | None
    """What the code is stored under; None: it is not."""
    planned: Planned | None = None
    is_training: bool = False
    calibration: Calibration | None = None  # where this is the step that measures
    saves_memory: bool = False  # the user has tensors computed again
    ratio: tuple[float, int] | None = None  # torch's activation_memory_budget, and the bytes it is a share of
    passes: tuple[PassReport, ...] = ()
    policies: Mapping[Node, Any] = field(default_factory=dict)  # what the partition is told of each node
    copied: tuple[int, ...] = ()
    peak_sizes: OtherSizes | None = None
    halves: Halves | None = None  # once the plan is complete
    said: list[Said] = field(default_factory=list)  # by the passes

    def run_passes(self, graph: Graph) -> None:
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
            work.damage = calibration.by_tensor()
            if work.damage is None:
                self.calibration = calibration
                pipeline.run(work, pipeline.calibration_for(work.settings))
                return
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
            self.compiler.log.notice(notice)
        for fact in work.facts:
            self.compiler.log.fact(fact)
        self._take(work)

    def after_torchs_passes(self, graph: Graph) -> None:
        regions.restore(self.policies)
        self.policies = {}
        copy_written_inputs(graph)
        sum_upsampled(graph)
        compat.keep_random_numbers(graph)

    def _work(self, joint: JointGraph) -> Work:
        return Work(
            joint,
            self.compiler.settings,
            given=self.given,
            siblings=self.compiler.trained(),
            memory_budget=compat.memory_budget(joint.graph),
            fixed_bytes=self.compiler.budget.fixed,
            peak_part=self.compiler.peak.part,
            looks_at_budgets=self.compiler.dump is not None,
            may_exceed_budget=self.is_training and self._saves_codes,
        )

    def _take(self, work: Work) -> None:
        plan, scales, self.peak_sizes = work.plan, work.scales, work.peak_sizes
        rows = len(plan.sites) if scales is None else scales.num_rows(len(plan.sites))
        if rows > self.captured.capacity:
            raise TableFull(rows)
        watched, joint = rows_of(plan, scales, self.compiler.settings), work.joint
        self.planned = Planned(plan, scales, watched, joint.num_forward_outputs, joint.contiguous_gradients)
        if self.is_training and not plan.sites and not plan.gemms:
            self._note_unplanned("nothing to hold low: no GEMM, and nothing of it is stored for backward")

    def _note_unplanned(self, detail: str) -> None:
        self.compiler.log.note("unplanned", self.compiler.log.name, detail)

    def compile_half(self, gm: GraphModule, examples: Sequence[Any], **options: Any) -> Compiled:
        """Lower and compile the forward or the backward graph; strip its statistics from the results."""
        if self.calibration is not None:
            return self.calibration.watch(gm)
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
            compiler.settings.processor,
            self.planned,
            saves_memory=self.saves_memory,
            recorder=compiler.recorder,
            tensors=compiler.tensors if self.is_training else None,
            watched=compiler.watched,
            peak=self._new_peak(),
        )

    def _new_peak(self) -> CompiledPeak | None:
        planned = self.planned
        if planned is None or planned.plan.peak_bytes is None:
            return None
        threads = self.compiler.settings.processor.threads
        return CompiledPeak(planned.num_results, self.captured.device.type, threads)

    def _complete_plan(self, forward: GraphModule) -> None:
        """Put into the plan what the partitioned graph really saves, and hold it to the budget."""
        if self.planned is None:  # it steps weights
            return
        plan, num_results = self.planned.plan, self.planned.num_results
        if self.is_training:
            predicted = plan.saved_bytes
            plan, saved = as_partitioned(plan, forward.graph, num_results, self.captured.inputs)
            self.copied = copied_inputs(forward.graph, num_results, self.captured.inputs)
            if self._saves_codes and self.given is None:
                assert predicted is not None, "a plan made here says what it saves"
                self.compiler.budget.hold(predicted.planned, saved)
            elif self._saves_codes:
                self.compiler.budget.tell(saved, self.step)
            self._tell_of_ratio(saved, forward.graph, num_results)
            plan = self._with_budget_note(plan, forward.graph)
        chooser = self.compiler.lowering.chooser
        plan = replace(plan, lowering=None if chooser is None else chooser.for_plan())
        self.planned = replace(self.planned, plan=plan)
        log.info("%s: %s", self.compiler.log.name, plan.summary())
        write_plan(plan, self.compiler.dump)

    def _tell_of_ratio(self, saved: int, forward: Graph, num_results: int) -> None:
        if self.ratio is None:
            return
        notice = over_ratio(*self.ratio, saved, forward, num_results)
        if notice is not None:
            self.compiler.log.notice(notice, step=self.step)

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

    def finished(self, run: Compiled) -> CompiledGraph:
        """Return what both halves, or the forward one alone, were compiled to. Raises `PlanAgain`, `BudgetError`."""
        self._hold_peak()
        graph = CompiledGraph.of(run, self.captured, self.planned, is_training=self.is_training, copied=self.copied)
        return replace(
            graph, is_calibration=self.calibration is not None, passes=self.passes, peak_sizes=self.peak_sizes
        )

    def _hold_peak(self) -> None:
        """Put into the plan what the compiled halves hold at their peak, and hold them to the budget."""
        if self.halves is None or self.halves.peak is None or self.planned is None:
            return
        plan, found = self.planned.plan, self.halves.peak
        if found.bytes is None and found.unread:
            note = f"peak budget: not compared with what is compiled: {found.unread}"
            self.planned = replace(self.planned, plan=replace(plan, notes=(*plan.notes, note)))
        if found.bytes is None or plan.peak_bytes is None:
            return
        peak = self.compiler.peak
        held = (
            peak.hold(plan.peak_bytes, found.bytes, found.waiting)
            if self.given is None
            else peak.tell(plan.peak_bytes, found.bytes, self.step)
        )
        held = replace(held, compiled_live=drawn(found.seen, int))
        self.planned = replace(self.planned, plan=replace(plan, peak_bytes=held))
        write_plan(self.planned.plan, self.compiler.dump)


# A rounded second moment becomes 0, a rounded update is lost.
_STEPS_WEIGHTS = "writes over weights or gradients, as an optimizer's step does: compiled as it is, nothing is rounded"
