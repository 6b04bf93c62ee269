"""One attempt to compile a captured graph that is not in the cache: run the passes, then lower each half.

This module is imported only then, because a start from the cache needs no pass.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.fx import Graph, GraphModule

from fxprec import compat
from fxprec.driver import progress
from fxprec.driver.compiled import CodePeak, Compiled, KnownHalf, Retry, Stop
from fxprec.driver.event_log import Said
from fxprec.driver.half_compilation import CompiledHalf, Halves
from fxprec.driver.memory import CompiledPeak, over_ratio
from fxprec.driver.wrappers import Run, entered
from fxprec.passes import pipeline
from fxprec.passes.analysis.joint import JointGraph
from fxprec.passes.analysis.saved_bytes import as_partitioned, copied_inputs, partitioned_size, read_by_backward
from fxprec.passes.analysis.sizes import budget_note, ranges_of
from fxprec.passes.analysis.tag_backward import tag_backward
from fxprec.passes.apply_updates import insert_updates, order_updates
from fxprec.passes.base import Work
from fxprec.passes.lowering.lowered import Generated
from fxprec.passes.lowering.nonfinite import keep_nonfinite
from fxprec.passes.lowering.rows import rows_of
from fxprec.passes.notice import readable
from fxprec.passes.partition import Partitioner, min_cut_halves
from fxprec.passes.pass_report import PassReport
from fxprec.plan import PeakBytes, Plan
from fxprec.report.watch import run_passes, write_plan

if TYPE_CHECKING:
    from fxprec.driver.compilation import Compilation
    from fxprec.driver.interpreter import Calibration

log = logging.getLogger(__name__)


class JointCompilation:
    """One attempt by tracing, with the state that the backward half needs if it is compiled in the first backward."""

    def __init__(self, attempt: Compilation) -> None:
        self.attempt, self.compiler, self.captured = attempt, attempt.compiler, attempt.captured
        self.compiled = Compiled(capacity=self.captured.capacity)
        self.peak: PeakBytes | None = None  # the passes' prediction
        self.calibration: Calibration | None = None  # set if the attempt compiles the calibration step
        self.ratio: tuple[float, int] | None = None  # torch's activation_memory_budget, and the bytes it is a share of
        self.passes: tuple[PassReport, ...] = ()
        self.partitioner: Partitioner | None = None  # for the graph that the passes rewrote
        self.halves: Halves | None = None  # set once the plan is complete
        self.said: list[Said] = []  # warnings and events of the passes

    @property
    def is_training(self) -> bool:
        """Whether the graph has a backward half."""
        return self.compiled.is_training

    def run_passes(self, graph: Graph) -> None:
        """Run the pipeline on the joint graph, in place."""
        searches = self.compiler.settings.peak_budget is not None  # the budget's search prints its own progress line
        with (
            self.compiler.log.heard() as said,
            progress.telling(f"planning {self.compiler.log.name}", has_own_line=searches),
        ):
            self._rewrite(graph)
        self.said += said

    def _rewrite(self, graph: Graph) -> None:
        """Plan and rewrite one joint (or inference) graph."""
        joint = JointGraph(graph, self.captured.inputs)
        if not joint.has_table:  # graph of torch.cond or a nested_compile_region: the outer graph's passes warn of it
            return
        self.compiled = replace(self.compiled, is_training=bool(joint.tangents))
        if joint.updates_weights:
            self._note_unplanned(_STEPS_WEIGHTS)
            return
        tag_backward(graph)
        work = self._work(joint)
        if self.is_training and self.attempt.given is None and (calibration := self.compiler.calibration) is not None:
            work.damage = calibration.by_tensor()
            if work.damage is None:
                self.calibration = calibration
                pipeline.run(work, pipeline.calibration_for(work.settings))
                return
        known = frozenset(graph.nodes)
        self.passes = tuple(run_passes(work, self.compiler.dump))
        if self.attempt.only_looks:
            self.peak = work.peak
            raise Stop(Retry(self.captured.capacity))
        if self.compiler.tensors is not None:
            self.compiler.tensors.expect(graph)
        self.partitioner = Partitioner(work, known)
        if work.memory_budget < 1 and self.is_training:
            self.ratio = work.memory_budget, read_by_backward(joint)
        for notice in work.notices:
            self.compiler.log.notice(notice)
        for fact in work.facts:  # what the machine lacks: the request is fulfilled, so there is no warning
            self.compiler.log.note("machine", fact.site, fact.detail)
        self._take(work)

    def partition(self, gm: GraphModule, inputs: Sequence[object], **options: object) -> compat.Halves:
        """Partition the joint graph that the passes rewrote, or a graph nested in it."""
        if self.partitioner is None or not JointGraph(gm.graph, self.captured.inputs).has_table:
            return min_cut_halves(gm, inputs, (), **options)
        assert self.partitioner.work.joint.graph is gm.graph, "torch's passes edit the graph, and make no other"
        stepped = self.compiler.stepped
        if not self.is_training or not insert_updates(JointGraph(gm.graph, self.captured.inputs), stepped):
            return self.partitioner(gm, inputs, **options)
        forward, backward = self.partitioner(gm, inputs, **options)
        order_updates(forward, backward)
        return forward, backward

    def _work(self, joint: JointGraph) -> Work:
        part = self.compiler.peak.part
        return Work(
            joint,
            self.compiler.settings,
            model=self.captured.model,
            given=self.attempt.given,
            siblings=self.compiler.trained(),
            stepped=self.compiler.stepped,
            memory_budget=compat.memory_budget(joint.graph),
            fixed_bytes=self.compiler.budget.fixed,
            peak_part=replace(part, wants_curve=True) if self.attempt.only_looks else part,
            looks_at_budgets=self.compiler.dump is not None and self.compiler.dump.looks_on,
            may_exceed_budget=self.is_training and self._saves_codes,
        )

    def _take(self, work: Work) -> None:
        plan, scales, joint = work.plan, work.scales, work.joint
        rows = len(plan.sites) if scales is None else scales.num_rows(len(plan.sites))
        if rows > self.captured.capacity:
            raise Stop(Retry(1 << rows.bit_length()))
        self.compiled = replace(
            self.compiled,
            plan=plan,
            scales=scales,
            rows=rows_of(plan, scales, self.compiler.settings),
            num_results=joint.num_forward_outputs,
            contiguous=joint.contiguous_gradients,
            peak_sizes=work.peak_sizes,
        )
        if self.is_training and not plan.sites and not plan.gemms:
            self._note_unplanned("nothing to hold low: the graph has no GEMM and saves nothing for backward")

    def set_plan(self, plan: Plan) -> None:
        """Take another state of the plan, and write it."""
        self.compiled = replace(self.compiled, plan=plan)
        write_plan(plan, self.compiler.dump)

    def _note_unplanned(self, detail: str) -> None:
        self.compiler.log.note("unplanned", self.compiler.log.name, detail)

    def compile_half(self, gm: GraphModule, examples: Sequence[Any], **options: object) -> Run:
        """Lower and compile the forward or the backward graph; strip its statistics from the results."""
        if self.calibration is not None:
            return self.calibration.watch(gm)
        name = "backward" if options.get("is_backward") else "forward"
        verb = "compiling" if self.is_training else "compiling for evaluation:"
        doing = progress.telling(f"{verb} {self.compiler.log.name}, {name} half")
        with self.compiler.log.heard() as said, doing:
            if name == "forward":
                self._complete_plan(gm)
                keep_nonfinite(gm.graph)  # first: what lowering is compared with keeps them too
                self.halves = self._new_halves()
            assert self.halves is not None, "forward comes first"
            half = self.halves.compile(gm, examples, options, name)
            self._say_how_lowered()
        donated = compat.take_donated() if name == "backward" else ()
        run = entered(half.run, half.lowered, donated, self.compiler.controller)
        if self.attempt.key is None:
            return run
        return compat.storable(run, self._known(half, name, said, donated), half.code)

    def _say_how_lowered(self) -> None:
        """Put into the plan which lowering was estimated to be faster for each half compiled so far."""
        chooser, plan = self.compiler.lowering.chooser, self.compiled.plan
        if chooser is not None and chooser.halves and plan is not None:
            self.set_plan(replace(plan, lowering=chooser.for_plan()))

    def _known(self, half: CompiledHalf, name: str, said: Sequence[Said], donated: tuple[int, ...]) -> KnownHalf:
        said = (*self.said, *said) if name == "forward" else tuple(said)
        lowered = replace(half.lowered, generated=Generated())  # kernels are part of the code
        assert self.halves is not None, "it compiled the half"
        peak = self.halves.code_peak if name == "backward" else None
        return KnownHalf(name, lowered, half.num_outputs, said, donated, self.compiled, peak)

    def _new_halves(self) -> Halves:
        compiler, plan, device = self.compiler, self.compiled.plan, self.captured.device.type
        if compiler.recorder is not None:
            compiler.recorder.inputs[compiler.log.name] = self.captured.inputs
        peak = None
        if plan is not None and plan.peak_bytes is not None:
            peak = CompiledPeak(self.compiled.num_results, device, compiler.settings.processor.threads)
        return Halves(compiler, device, self.compiled, peak=peak)

    def _complete_plan(self, forward: GraphModule) -> None:
        """Put into the plan what the partitioned graph really saves. Retry if that exceeds the activation budget."""
        plan, num_results = self.compiled.plan, self.compiled.num_results
        if plan is None:  # the graph steps weights
            return
        if self.is_training:
            predicted = plan.saved_bytes
            plan, saved = as_partitioned(plan, forward.graph, num_results, self.captured.inputs)
            copied = copied_inputs(forward.graph, num_results, self.captured.inputs)
            self.compiled = replace(self.compiled, copied=copied)
            if self._saves_codes and self.attempt.given is None:
                assert predicted is not None, "a plan made here says what it saves"
                if not self.compiler.budget.hold(predicted.planned, saved):
                    raise Stop(Retry(self.captured.capacity))
            elif self._saves_codes:
                self.compiler.budget.tell(saved, self.attempt.step)
            notice = None if self.ratio is None else over_ratio(*self.ratio, saved, forward.graph, num_results)
            if notice is not None:
                self.compiler.log.notice(notice, step=self.attempt.step)
            plan = self._with_budget_note(plan, forward.graph)
        chooser = self.compiler.lowering.chooser
        lowering = None if chooser is None else chooser.for_plan()
        plan = replace(plan, lowering=lowering, whole_step=self.compiler.whole_step)
        self.set_plan(plan)
        log.info("%s: %s", self.compiler.log.name, plan.summary())

    def _with_budget_note(self, plan: Plan, forward: Graph) -> Plan:
        """Add a note to the plan if the budget does not hold for all sizes that the guards allow."""
        budget = plan.activation_budget
        if budget is None or self.attempt.given is not None or not self._saves_codes:
            return plan
        size = partitioned_size(forward, self.compiled.num_results)
        note = budget_note(budget, readable(budget), size, ranges_of(forward))
        if note is None:
            return plan
        if note.is_broken:
            self.compiler.log.tell(self.compiler.log.name, note.text, step=self.attempt.step)
        return replace(plan, notes=(*plan.notes, note.text))

    @property
    def _saves_codes(self) -> bool:
        """Whether a budget bounds the bytes really saved. A simulation saves float32; its budget counts codes."""
        return not self.compiler.settings.is_simulated

    def result(self) -> tuple[Compiled, CodePeak | None]:
        """Return the compiled graph without its code, and the peak of the code under a peak budget."""
        compiled = replace(self.compiled, is_calibration=self.calibration is not None, passes=self.passes)
        return compiled, None if self.halves is None else self.halves.code_peak


# Rounding would turn a small second moment into 0, and lose a small update.
_STEPS_WEIGHTS = "overwrites weights or gradients, as an optimizer's step does: compiled unchanged, nothing is rounded"
