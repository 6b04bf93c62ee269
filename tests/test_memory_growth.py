"""Steps leave nothing behind."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch
from backend_helpers import eager_backend
from torch import nn

STEPS = 200


@pytest.mark.parametrize("storage", ["packed", "simulate"])
def test_memory_does_not_grow_with_steps(storage: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    backend = eager_backend(storage, recipe="hfp8")
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(8, 4)

    def steps(count: int) -> None:
        for _ in range(count):
            compiled(x).square().mean().backward()
            model.zero_grad()

    tracemalloc.start()
    try:
        steps(400)  # past compilation, a refresh of all scales, and the growth of Python's and torch's free lists
        gc.collect()
        objects, before = len(gc.get_objects()), tracemalloc.get_traced_memory()[0]
        steps(STEPS)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(gc.get_objects()) <= objects + STEPS // 20
    assert grown < 60 * STEPS, f"{grown} bytes in {STEPS} steps"  # aot_eager: 20 a step and falling
    assert len(backend._graphs[0].controller.queue) <= 2
