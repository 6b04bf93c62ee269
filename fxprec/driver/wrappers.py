"""Wrap the code of a half: profiler ranges, errors of kernels that cannot start, statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.profiler import record_function

from fxprec import compat
from fxprec.errors import LoweringError
from fxprec.passes.lowering.lowered import Incoming, Lowered
from fxprec.runtime.controller import Controller
from fxprec.runtime.cpu.codes import count_codes
from fxprec.runtime.stats import StatsQueue

Run = Callable[..., Any]
"""The code of a half, called with a list of its arguments."""


def with_stats(run: Run, lowered: Lowered, num_outputs: int, queue: StatsQueue) -> Run:
    """Wrap ``run``, so that the statistics that lowering appended to its results go to the queue."""
    if not lowered.all_rows:
        return run
    compat.trim_output_strides(num_outputs)

    def call(args: list[Any]) -> Any:
        table = args[lowered.coded[0].table] if lowered.coded else None
        results = run(args)
        if lowered.rows:
            queue.push(lowered.rows, torch.cat(results[num_outputs:]), lowered.counted)
        if table is not None and not queue.is_muted:
            codes = [results[coded.position] for coded in lowered.coded]
            column = table[:, 0].tolist()
            exps = [column[row] for row in lowered.coded_rows]
            queue.push(lowered.coded_rows, count_codes(codes, lowered.coded_formats, exps))
        return results[:num_outputs]

    return compat.boxed(call)


def entered(run: Run, lowered: Lowered, donated: Collection[int], controller: Callable[[], Controller | None]) -> Run:
    """Add the outermost wrappers, which must see a half's arguments before watchers and recorders do."""
    return retained(_begun(run, lowered.incoming, controller), donated)


def _begun(run: Run, incoming: Incoming | None, controller: Callable[[], Controller | None]) -> Run:
    """Wrap a backward half, so that the incoming gradients choose the scales in its first call."""
    if incoming is None:
        return run

    def call(args: list[Any]) -> Any:
        found, table = controller(), args[incoming.table]
        if found is not None and not isinstance(table, compat.FakeTensor):
            args[incoming.table] = found.begin([args[i] for i in incoming.gradients], table)
        return run(args)

    return compat.boxed(call)


def retained(run: Run, donated: Collection[int]) -> Run:
    """Wrap a backward half, which may overwrite its ``donated`` inputs: copy them first if the graph is retained."""
    if not donated:
        return run

    def call(args: list[Any]) -> Any:
        if compat.keeps_graph():
            for i in donated:
                args[i] = args[i].clone()
        return run(args)

    return compat.boxed(call)


def named_launches(run: Run, kernels: Collection[str], half: str) -> Run:
    """Wrap ``run``, so that ``kernels`` that cannot start raise a `LoweringError` with their names.

    The step is not repeated without the kernel, because earlier kernels may have written to the model's buffers.
    """
    if not kernels:
        return run

    def call(args: list[Any]) -> Any:
        try:
            return run(args)
        except Exception as error:
            cause = compat.why_not_started(error)
            name = compat.kernel_running(error)
            if cause is None or (name is not None and name not in kernels):  # torch's own
                raise
            raise LoweringError(
                f"the generated kernel {name or ', '.join(sorted(kernels)[:3]) + ' or another'} of {half} compiles but "
                f"cannot be launched: {cause.rstrip('.')}; compile with options={{'lowering': 'inductor'}}, which "
                "generates no kernels"
            ) from error

    return compat.boxed(call)


def ranged(run: Run, graph: str, half: str) -> Run:
    """Wrap ``run`` in a profiler range such as ``fxprec graph 0 forward``, used only while a profiler is on."""

    def call(args: list[Any]) -> Any:
        if not compat.is_profiling():
            return run(args)
        with record_function(f"fxprec {graph} {half}"):
            return run(args)

    return compat.boxed(call)
