"""Steps leave nothing behind."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch
from backend_helpers import eager_backend
from torch import nn

import fxprec

STEPS = 200


@pytest.mark.parametrize("compute", ["high", pytest.param("stored", marks=pytest.mark.full), None])
def test_memory_does_not_grow_with_steps(compute: str | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    # The history of scales grows at a refresh, up to its bound; it is no part of a step.
    options = {"recipe": "hfp8", "compute": compute, "grad_scaling": fxprec.GradScaling(interval=100_000)}
    backend = eager_backend("packed" if compute else "simulate", **options)
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(8, 4)

    def steps(count: int) -> None:
        for _ in range(count):
            compiled(x).square().mean().backward()
            model.zero_grad()

    def growth() -> tuple[int, int]:
        gc.collect()
        objects, before = len(gc.get_objects()), tracemalloc.get_traced_memory()[0]
        steps(STEPS)
        gc.collect()
        return len(gc.get_objects()) - objects, tracemalloc.get_traced_memory()[0] - before

    steps(400)  # past compilation, and the first choice of scales
    tracemalloc.start()  # what was allocated before it is not missed when freed: a window shows no less than grew
    try:
        windows = [growth() for _ in range(3)]
    finally:
        tracemalloc.stop()
    # Free lists of Python and torch come and go by some 60 bytes a step, with aot_eager too: what leaks grows always.
    objects, size = (min(column) for column in zip(*windows, strict=True))
    assert objects <= STEPS // 20, f"objects and bytes in {STEPS} steps: {windows}"
    assert size < 30 * STEPS, f"objects and bytes in {STEPS} steps: {windows}"
    assert len(backend._graphs[0].controller.queue) <= 2
