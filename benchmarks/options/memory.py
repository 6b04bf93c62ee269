"""The bytes that a compiled step holds by the allocator's events, beside its budget."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory.measure import peak_bytes
from benchmarks.options.cases import Case, setting
from benchmarks.options.networks import shapes
from benchmarks.options.training import Training

UNLIKE = ("parts", "uneven", "retain", "flight", "outer", "functional", "hooks", "skipped", "penalty", "promote", "input_grad",
          "between", "sizes")  # fmt: skip
"""Habits that hold more than a budget counts, or whose steps are not those that the plan was made for."""


def over_budget(case: Case, training: Training, step: int) -> Iterator[str]:
    """Yield by how much the next step of a training holds more than its budget, and what the loss explains."""
    plans = [plan.peak_bytes for plan in training.backend.latest_plans if plan.peak_bytes is not None]
    is_told = any(event.kind == "fallback" for event in training.backend.events)
    if (
        not plans
        or is_told
        or setting(case, "device") != "cpu"  # whose allocator rounds sizes up to 512 bytes
        or any(name in case for name in UNLIKE)
        or setting(case, "second") in ("own", "same", "tied")
    ):
        return
    parts = training.parts(step)
    training.optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        for _ in training.passes(parts, step):
            pass
    budget, held = plans[0].budget, peak_bytes(profiled)
    sizes = shapes(training.case.network, len(parts[0]))
    # A target, the results as float32 and in a row, their gradient.
    beside = 4 * 4 * sum(torch.Size(shape).numel() for shape in sizes)
    if held > budget + beside:
        yield f"a budget of {budget} bytes: the step holds {held}, and its loss {beside}"
