"""Count the bytes that torch's profiler saw allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocated_peak(run: Callable[[], object]) -> int:
    """Return the most bytes in CPU memory, live at once, that ``run`` allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        run()
    return peak_bytes(profiled)


def peak_bytes(profiled: profile) -> int:
    """Return the most bytes live at once that were allocated since a memory profile began."""
    kineto: Any = profiled.profiler.kineto_results  # type: ignore[union-attr]
    events = (e for e in kineto.events() if e.name() == "[memory]")
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
