"""Lower and compile the forward and the backward half of one partitioned graph."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from fxprec import compat
from fxprec.compat import copied
from fxprec.compat.scaled_mm import multiplies_blocks
from fxprec.config.processor import Processor
from fxprec.driver.compiled import CodePeak, Compiled, codegen_sources
from fxprec.driver.interpreter import interpreted
from fxprec.driver.interpreter import interpreted_by_group as by_group
from fxprec.driver.lowering import interpreted_kernels
from fxprec.driver.memory import CompiledPeak, PlainHalf
from fxprec.driver.record import RecordedHalf
from fxprec.driver.wrappers import Run
from fxprec.kernels.host import IN_PLACE_ORDER
from fxprec.passes.analysis.joint import results_of
from fxprec.passes.analysis.kernel_order import Kernel, better_order
from fxprec.passes.analysis.replay.kernels import workspace_of
from fxprec.passes.lowering.lower import lower
from fxprec.passes.lowering.lowered import Lowered
from fxprec.passes.lowering.wide_gemms import widen_gemms

if TYPE_CHECKING:
    from fxprec.compat.order import OrderedKernel
    from fxprec.driver.compilation import Compiler


@dataclass(frozen=True)
class CompiledHalf:
    """One compiled half: its callable, and the code inside."""

    run: Run
    code: Run
    """The callable that Inductor returned, or the interpreter of the half."""
    lowered: Lowered
    num_outputs: int
    """Number of outputs, not counting statistics."""


@dataclass
class Halves:
    """The halves of one compilation; the backward half may be compiled as late as the first backward pass."""

    compiler: Compiler
    device_type: str
    compiled: Compiled
    """What the passes decided: the plan, if there is one, and what each row of the scale table is for."""
    seen_by_forward: frozenset[int] = frozenset()
    """Rows that forward measures; backward does not measure them again when it recomputes their tensors."""
    peak: CompiledPeak | None = None
    """Receives the allocations of each compiled half, under a peak budget."""

    def __post_init__(self) -> None:
        self.lowering = self.compiler.lowering

    @property
    def code_peak(self) -> CodePeak | None:
        """The peak of the halves' code, under a peak budget."""
        return None if self.peak is None else self.peak.of_code()

    def compile(self, gm: GraphModule, examples: Sequence[Any], options: Mapping[str, Any], name: str) -> CompiledHalf:
        """Lower and compile the half called ``name``; its statistics go to the queue and not into the results."""
        widen_gemms(gm.graph, self.compiler.settings.processor)  # first, so that watchers see the graph that runs
        of_training = (self.compiler.tensors, self.compiler.numerics) if self.compiled.is_training else ()
        watchers = [watcher for watcher in (self.compiler.recorder, *of_training) if watcher is not None]
        symbolic = [RecordedHalf(copied(gm), self.compiled) for _ in watchers]  # lowering edits the graph
        half = self._compile(gm, examples, options, name)
        for watcher, recorded in zip(watchers, symbolic, strict=True):
            half = replace(half, run=watcher.watch(self.compiler.log.name, name, recorded, half.run))
        return half

    def _compile(self, gm: GraphModule, examples: Sequence[Any], options: Mapping[str, Any], name: str) -> CompiledHalf:
        num_outputs = len(results_of(gm.graph))
        plain = PlainHalf.of(gm, examples, is_backward=name == "backward")
        half = self.lowering.compile(gm, partial(self._lower, name), partial(self._built, plain, options, name), name)
        if name == "forward":
            self.seen_by_forward = frozenset(half.lowered.all_rows)
        for place, why in half.lowered.decoded:
            self.compiler.log.tell(place, f"its operands in blocks are decoded and multiplied in 16 bits: {why}")
        kernels = half.lowered.generated.kernels
        dump, plan = self.compiler.dump, self.compiled.plan
        if dump is not None and plan is not None and (kernels or self.lowering.name == "triton"):
            dump.write_kernels(kernels, plan, name)
        run = self.compiler.wrapped(half if half.has_first_run else half.run, name, half.lowered, num_outputs)
        return CompiledHalf(run, half.run, half.lowered, num_outputs)

    def _lower(self, name: str, gm: GraphModule, lowering: str, without: frozenset[str]) -> Lowered:
        rows = self.compiled.rows.without(self.seen_by_forward)
        contiguous = () if name == "forward" else self.compiled.contiguous
        calls = compat.TritonCalls()
        return lower(
            gm,
            lowering,
            self.device_type,
            rows,
            calls=calls,
            without=without,
            contiguous=contiguous,
            multiplies_blocks=multiplies_blocks(self.lowering.device),
        )

    def scales(self, name: str) -> bool:
        """Return whether the half called ``name`` reads scales: backward of gradients, forward of copies."""
        rows = self.compiled.rows
        return bool(rows.scaled if name == "backward" else rows.copied)

    def _built(self, plain: PlainHalf, options: Mapping[str, Any], name: str, gm: GraphModule) -> Run:
        if self.lowering.name == "eager":
            return by_group(gm, interpreted(gm))
        if self.lowering.is_interpreted:
            return interpreted_kernels(interpreted(gm))
        compat.hand_on_inputs(gm.graph)
        key, processor = codegen_sources(), self.compiler.settings.processor
        saving = (
            compat.saving_memory(partial(in_saving_order, processor), f"{key} {processor}", IN_PLACE_ORDER)
            if self.compiled.is_training
            else contextlib.nullcontext()
        )
        on_cpu = self.device_type == "cpu"
        equal = compat.loops_share_files() if on_cpu else compat.constant_places_are_arguments()
        loops = compat.calls_in_loops() if on_cpu else compat.only_tensors_are_loads(self.scales(name))
        with compat.code_keyed_by(key), compat.tiles_for_bytes(), compat.bitcasts_in_loops(), equal, loops, saving:
            code: Run = compat.compile_fx_inner(gm, plain.examples, **options)
        if self.peak is not None:
            self.peak.saw(plain, code)
        return code


def in_saving_order(processor: Processor, kernels: Sequence[OrderedKernel], kept: frozenset[str]) -> list[int] | None:
    """Return the order of the kernels that a plan counts with, or None if that is the given order."""
    found = [
        Kernel(made, read, after, 0 if call is None else workspace_of(call, processor), over)
        for made, read, after, call, over in kernels
    ]
    return better_order(found, kept)
