"""What the first step of a graph under a ``peak_budget`` held on a GPU, beside what its plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxprec import compat
from fxprec.driver.event_log import EventLog
from fxprec.passes.analysis.peak.reserve import workspaces
from fxprec.passes.notice import readable
from fxprec.plan import PeakBytes

Compiled = Callable[..., Any]
MISSED = 0.05  # of the plan's bytes, above which it is a warning


class StepMemory:
    """Compares once, by the caching allocator's own counts, which it does not reset."""

    def __init__(self, log: EventLog, device: torch.device, planned: Callable[[], PeakBytes | None]) -> None:
        self._log, self._device, self._planned = log, device, planned
        self._start: tuple[int, int] | None = None
        self._is_done = device.type != "cuda"

    def watch(self, run: Compiled, half: str) -> Compiled:
        """Return ``run``, which notes what was allocated before its first forward, and at the peak of its backward."""
        if self._is_done:
            return run

        def call(args: list[Any]) -> Any:
            if self._is_done:
                return run(args)
            if half == "forward":
                self._start = compat.allocated(self._device)
            results = run(args)
            if half == "backward" and self._start is not None:
                self._compare(*self._start)
            return results

        return compat.boxed(call)

    def _compare(self, start: int, peak_before: int) -> None:
        peak = self._planned()
        self._is_done = True
        if peak is None or peak.graphs > 1:  # other graphs of the step hold memory too
            return
        highest = compat.allocated(self._device)[1]
        held = highest - start
        wanted = (peak.planned if peak.compiled is None else peak.compiled) + workspaces(self._device)
        if highest == peak_before:
            detail = f"the first step held at most {readable(held)}, and more lived before it; the plan says "
            self._log.note("memory", self._log.name, f"{detail}{readable(wanted)} with cuBLAS's workspaces", step=1)
            return
        missed = held / max(wanted, 1) - 1
        detail = (
            f"the first step held {readable(held)} on {self._device}, the plan says {readable(wanted)} with cuBLAS's "
            f"workspaces: {abs(missed):.1%} {'more' if missed > 0 else 'less'}"
        )
        self._log.note("memory", self._log.name, detail, step=1)
        if missed > MISSED:
            self._log.warn(
                f"peak_budget {readable(peak.budget)}: {detail}; give it that much less, or report it with "
                "torch.cuda.memory_stats()"
            )
