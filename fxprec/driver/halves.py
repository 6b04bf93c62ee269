"""Lowering and compiling the forward and the backward half of one partitioned graph."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from fxprec import compat
from fxprec.driver.calibration import interpreted
from fxprec.driver.capture import copied
from fxprec.driver.compiled import Planned
from fxprec.driver.compiled_peak import CompiledPeak, PlainHalf
from fxprec.driver.fallback import Compiled, Half, Lowering, interpreted_kernels
from fxprec.driver.ranges import interpreted_by_group as by_group
from fxprec.driver.ranges import ranged
from fxprec.driver.recorder import RecordedHalf, Recorder
from fxprec.driver.tensor_dump import TensorDump
from fxprec.passes.analysis.joint import results_of
from fxprec.passes.analysis.kernel_order import Kernel, peak_bytes, saving_order
from fxprec.passes.lowering import Lowered, lower
from fxprec.passes.lowering.rows import WatchedRows
from fxprec.report.folder import GraphDump
from fxprec.runtime.cpu.codes import count_codes
from fxprec.runtime.stats import StatsQueue


@dataclass
class Halves:
    """The halves of one compilation; the backward one may come in the first backward pass only."""

    graph: str
    lowering: Lowering
    queue: StatsQueue
    dump: GraphDump | None
    device_type: str
    planned: Planned | None
    """None where nothing is rounded."""
    saves_memory: bool = False
    """Whether the user trades time for memory, by checkpoints or a budget: kernels run in an order that saves it."""
    seen_by_forward: frozenset[int] = frozenset()
    """Rows: what backward recomputes is not measured again."""
    recorder: Recorder | None = None
    tensors: TensorDump | None = None
    peak: CompiledPeak | None = None
    """Takes in what each half allocates, under a peak budget."""

    def compile(self, gm: GraphModule, examples: Sequence[Any], options: Mapping[str, Any]) -> Compiled:
        """Lower and compile one half; its statistics go to the queue and not into the results."""
        name = "backward" if options.get("is_backward") else "forward"
        watchers = [watcher for watcher in (self.recorder, self.tensors) if watcher is not None]
        symbolic = [RecordedHalf(copied(gm), self.planned) for _ in watchers]  # lowering edits the graph
        run = self._compile(gm, examples, options, name)
        for watcher, recorded in zip(watchers, symbolic, strict=True):
            run = watcher.watch(self.graph, name, recorded, run)
        return run

    def _compile(self, gm: GraphModule, examples: Sequence[Any], options: Mapping[str, Any], name: str) -> Compiled:
        num_outputs = len(results_of(gm.graph))
        plain = PlainHalf.of(gm, examples, is_backward=name == "backward")

        def build(gm: GraphModule) -> Compiled:
            return ranged(self._built(gm, plain, options), f"fxprec {self.graph} {name}")

        half = self.lowering.compile(gm, self._lower, build)
        if name == "forward":
            self.seen_by_forward = frozenset(half.lowered.all_rows)
        if self.dump is not None and self.planned is not None and self.lowering.name == "triton":
            self.dump.write_kernels(half.lowered.generated.kernels, self.planned.plan, name)
        if not half.lowered.all_rows:
            return half if half.has_first_run else half.run
        compat.trim_output_strides(num_outputs)
        return _with_stats(half, num_outputs, self.queue)

    def _lower(self, gm: GraphModule, lowering: str, without: frozenset[str]) -> Lowered:
        rows = WatchedRows() if self.planned is None else self.planned.rows.without(self.seen_by_forward)
        return lower(gm, lowering, self.device_type, rows, calls=compat.TritonCalls(), without=without)

    def _built(self, gm: GraphModule, plain: PlainHalf, options: Mapping[str, Any]) -> Compiled:
        if self.lowering.name == "eager":
            return by_group(gm, interpreted(gm))
        if self.lowering.is_interpreted:
            return interpreted_kernels(interpreted(gm))
        compat.hand_on_inputs(gm.graph)
        saving = compat.saving_memory(in_saving_order, _ORDER) if self.saves_memory else contextlib.nullcontext()
        with compat.tiles_for_bytes(), compat.bitcasts_in_loops(), saving:
            code: Compiled = compat.compile_fx_inner(gm, plain.examples, **options)
        if self.peak is not None:
            self.peak.saw(plain, code)
        return code


_ORDER = "fxprec-order-1"  # changes with what the next function does


def in_saving_order(
    kernels: Sequence[tuple[dict[str, int], dict[str, int], frozenset[int]]], kept: frozenset[str]
) -> list[int] | None:
    """Return an order of kernels that holds fewer bytes at once than the one given, or None."""
    found = [Kernel(*kernel) for kernel in kernels]
    order = saving_order(found)
    is_better = peak_bytes(found, order, kept) < peak_bytes(found, range(len(found)), kept)
    return order if is_better else None


def _with_stats(half: Half, num_outputs: int, queue: StatsQueue) -> Compiled:
    def call(args: list[Any]) -> Any:
        results = half(args)
        lowered = half.lowered
        if lowered.rows:
            queue.push(lowered.rows, torch.cat(results[num_outputs:]), lowered.counted)
        if lowered.coded and not queue.is_muted:
            codes = [results[coded.position] for coded in lowered.coded]
            queue.push(lowered.coded_rows, count_codes(codes, lowered.coded_formats))
        return results[:num_outputs]

    return compat.boxed(call)
