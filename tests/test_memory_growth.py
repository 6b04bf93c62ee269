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


def is_steady(objects: int, size: int) -> bool:
    """Less than half of the smallest object a step. Free lists of Python and torch wander by some 4 KB in all."""
    return objects <= STEPS // 20 and size < 30 * STEPS


@pytest.mark.parametrize("storage", ["packed", "simulate"])
def test_memory_does_not_grow_with_steps(storage: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    # The history of scales grows at a refresh, up to its bound; it is no part of a step.
    backend = eager_backend(storage, recipe="hfp8", grad_scaling=fxprec.GradScaling(interval=100_000))
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

    windows: list[tuple[int, int]] = []
    tracemalloc.start()
    try:
        steps(150)  # past compilation, and the first choice of scales
        while len(windows) < 5 and not (windows and is_steady(*windows[-1])):
            windows.append(growth())
    finally:
        tracemalloc.stop()
    assert is_steady(*windows[-1]), f"objects and bytes in {STEPS} steps: {windows}"
    assert len(backend._graphs[0].controller.queue) <= 2
