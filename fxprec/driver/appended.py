"""Statistics that lowering appended to a half's results: they go to the queue, and no caller sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxprec import compat
from fxprec.passes.lowering.lowered import Lowered
from fxprec.runtime.cpu.codes import count_codes
from fxprec.runtime.stats import StatsQueue

Compiled = Callable[..., Any]


def with_stats(run: Compiled, lowered: Lowered, num_outputs: int, queue: StatsQueue) -> Compiled:
    """Return ``run``, but what lowering appended to its results goes to the queue."""
    if not lowered.all_rows:
        return run
    compat.trim_output_strides(num_outputs)

    def call(args: list[Any]) -> Any:
        results = run(args)
        if lowered.rows:
            queue.push(lowered.rows, torch.cat(results[num_outputs:]), lowered.counted)
        if lowered.coded and not queue.is_muted:
            codes = [results[coded.position] for coded in lowered.coded]
            queue.push(lowered.coded_rows, count_codes(codes, lowered.coded_formats))
        return results[:num_outputs]

    return compat.boxed(call)
