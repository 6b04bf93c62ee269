"""Lowering and compiling the forward and the backward half of one partitioned graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.fx import GraphModule

from fxprec import compat
from fxprec.config.processor import Processor
from fxprec.driver.appended import with_stats
from fxprec.driver.calibration import interpreted
from fxprec.driver.capture import copied
from fxprec.driver.compiled import Planned
from fxprec.driver.compiled_peak import CompiledPeak, PlainHalf
from fxprec.driver.fallback import Compiled, Lowering, interpreted_kernels
from fxprec.driver.group_ranges import interpreted_by_group as by_group
from fxprec.driver.launches import named_launches
from fxprec.driver.ranges import range_name, ranged
from fxprec.driver.recorder import RecordedHalf, Recorder
from fxprec.driver.tensor_dump import TensorDump
from fxprec.driver.warm_start import codegen_sources
from fxprec.ir.symbolic_host import IN_PLACE_ORDER
from fxprec.passes.analysis.joint import results_of
from fxprec.passes.analysis.kernel_order import Kernel, peak_bytes, saving_order
from fxprec.passes.lowering.lower import lower
from fxprec.passes.lowering.lowered import Lowered
from fxprec.passes.lowering.rows import WatchedRows
from fxprec.passes.lowering.wide_gemms import widen_gemms
from fxprec.report.folder import GraphDump
from fxprec.runtime.stats import StatsQueue


@dataclass(frozen=True)
class CompiledHalf:
    """What runs, and what it is made of."""

    run: Compiled
    code: Compiled | None
    """What Inductor returned, or what interprets the half."""
    lowered: Lowered
    num_outputs: int
    """Without the statistics."""


@dataclass
class Halves:
    """The halves of one compilation; the backward one may come in the first backward pass only."""

    graph: str
    lowering: Lowering
    queue: StatsQueue
    dump: GraphDump | None
    device_type: str
    processor: Processor
    planned: Planned | None
    """None where nothing is rounded."""
    saves_memory: bool = False
    """Whether the user trades time for memory, by checkpoints or a budget: kernels run in an order that saves it."""
    seen_by_forward: frozenset[int] = frozenset()
    """Rows: what backward recomputes is not measured again."""
    recorder: Recorder | None = None
    tensors: TensorDump | None = None
    watched: Callable[[Compiled, str], Compiled] | None = None
    peak: CompiledPeak | None = None
    """Takes in what each half allocates, under a peak budget."""

    def compile(self, gm: GraphModule, examples: Sequence[Any], options: Mapping[str, Any], name: str) -> CompiledHalf:
        """Lower and compile the half of that name; its statistics go to the queue and not into the results."""
        widen_gemms(gm.graph, self.processor)  # first: whoever watches sees what runs
        watchers = [watcher for watcher in (self.recorder, self.tensors) if watcher is not None]
        symbolic = [RecordedHalf(copied(gm), self.planned) for _ in watchers]  # lowering edits the graph
        half = self._compile(gm, examples, options, name)
        for watcher, recorded in zip(watchers, symbolic, strict=True):
            half = replace(half, run=watcher.watch(self.graph, name, recorded, half.run))
        return half

    def _compile(self, gm: GraphModule, examples: Sequence[Any], options: Mapping[str, Any], name: str) -> CompiledHalf:
        num_outputs = len(results_of(gm.graph))
        plain = PlainHalf.of(gm, examples, is_backward=name == "backward")
        code: Compiled | None = None

        def build(gm: GraphModule) -> Compiled:
            nonlocal code
            code = self._built(gm, plain, options, name)
            return ranged(code, range_name(self.graph, name))

        half = self.lowering.compile(gm, partial(self._lower, name), build, name)
        if name == "forward":
            self.seen_by_forward = frozenset(half.lowered.all_rows)
        kernels = half.lowered.generated.kernels
        if self.dump is not None and self.planned is not None and (kernels or self.lowering.name == "triton"):
            self.dump.write_kernels(kernels, self.planned.plan, name)
        run = half if half.has_first_run else half.run
        run = named_launches(run, half.lowered.kernel_names, f"{self.graph}'s {name} half")
        if self.watched is not None:
            run = self.watched(run, name)
        return CompiledHalf(with_stats(run, half.lowered, num_outputs, self.queue), code, half.lowered, num_outputs)

    def _lower(self, name: str, gm: GraphModule, lowering: str, without: frozenset[str]) -> Lowered:
        rows = WatchedRows() if self.planned is None else self.planned.rows.without(self.seen_by_forward)
        contiguous = () if self.planned is None or name == "forward" else self.planned.contiguous
        calls = compat.TritonCalls()
        return lower(gm, lowering, self.device_type, rows, calls=calls, without=without, contiguous=contiguous)

    def scales(self, name: str) -> bool:
        """Say whether the half of that name reads scales of gradients."""
        return name == "backward" and self.planned is not None and bool(self.planned.rows.scaled)

    def _built(self, gm: GraphModule, plain: PlainHalf, options: Mapping[str, Any], name: str) -> Compiled:
        if self.lowering.name == "eager":
            return by_group(gm, interpreted(gm))
        if self.lowering.is_interpreted:
            return interpreted_kernels(interpreted(gm))
        compat.hand_on_inputs(gm.graph)
        key = codegen_sources()
        saving = (
            compat.saving_memory(in_saving_order, key, IN_PLACE_ORDER)
            if self.saves_memory
            else contextlib.nullcontext()
        )
        on_cpu = self.device_type == "cpu"
        files = compat.loops_share_files() if on_cpu else contextlib.nullcontext()
        loops = compat.calls_in_loops() if on_cpu else compat.only_tensors_are_loads(self.scales(name))
        with compat.code_keyed_by(key), compat.tiles_for_bytes(), compat.bitcasts_in_loops(), files, loops, saving:
            code: Compiled = compat.compile_fx_inner(gm, plain.examples, **options)
        if self.peak is not None:
            self.peak.saw(plain, code)
        return code


def in_saving_order(
    kernels: Sequence[tuple[dict[str, int], dict[str, int], frozenset[int]]], kept: frozenset[str]
) -> list[int] | None:
    """Return an order of kernels that holds fewer bytes at once than the one given, or None."""
    found = [Kernel(*kernel) for kernel in kernels]
    order = saving_order(found)
    is_better = peak_bytes(found, order, kept) < peak_bytes(found, range(len(found)), kept)
    return order if is_better else None
