"""Time on the device: events, warm-up, medians, all sides of a row in turn, a cold L2 cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 cache of any of these GPUs


def in_turn(
    sides: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    repeats: int = 10,
    warm_up: int = 2,
    flush: bool = False,
) -> dict[str, float]:
    """Return the median seconds of each side; they take turns (A B C, A B C, ...)."""
    if device.type != "cuda":
        return _on_host(sides, repeats)  # a stand-in that runs everything through once
    for run in sides.values():
        for _ in range(warm_up):
            run()
    scratch = torch.empty(FLUSH_BYTES if flush else 0, dtype=torch.int8, device=device)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in sides}
    torch.cuda.synchronize(device)
    for _ in range(repeats):
        for name, run in sides.items():
            scratch.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize(device)
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3 for name, pairs in events.items()}


def of_host(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds until ``run`` returns to an idle device: those in which the host gives out work."""
    taken = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _on_host(sides: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in taken.items()}
