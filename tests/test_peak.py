"""What lives at the peak of a step whose blocks are recomputed, by the allocator's events."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import Apply, Checkpointed, FeedForward
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory.measure import peak_bytes
from fxprec.config.processor import Processor
from fxprec.kernels.wide_gemms import NAMESPACE
from fxprec.passes.analysis.replay.workspace import workspace

ROWS, WIDTH, HIDDEN, BLOCKS = 2048, 64, 256, 3


@pytest.mark.cpu_dependent  # oneDNN's workspace is that of the processor which runs it
@pytest.mark.inductor
def test_two_of_the_three_wide_tensors_of_a_recomputed_block_live_at_once() -> None:
    """`up`, `gelu` and a gradient are as wide: `gelu` has been read when the gradient of it is computed."""
    blocks = (Checkpointed(FeedForward(WIDTH, HIDDEN)) for _ in range(BLOCKS))
    model, x = nn.Sequential(*blocks, Apply(lambda x: x.square().mean())), torch.randn(ROWS, WIDTH)
    reference = torch.autograd.grad(model(x), list(model.parameters()))
    compiled = torch.compile(model, backend="fxprec", options={"recipe": "fp8"})
    compiled(x).backward()
    found = [p.grad for p in model.parameters()]
    for a, b in zip(found, reference, strict=True):
        assert F.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.999
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        compiled(x).backward()
    wide, narrow = 2 * ROWS * HIDDEN, 2 * ROWS * WIDTH
    gradients = 4 * sum(p.numel() for p in model.parameters())
    # What the loss reads is in float32, and stands for the residual's gradient, which loops compute from it; and rounded.
    boundaries, passing = (BLOCKS - 1) * narrow, 3 * narrow
    weight = 2 * WIDTH * HIDDEN  # in bf16, for a product
    assert peak_bytes(profiled) < 2 * wide + boundaries + passing + gradients + weight + _workspace()


def _workspace() -> int:
    """Return the bytes that the product of a weight's gradient takes beside its result, at which a step peaks."""
    gradient, gelu = (torch.empty(ROWS, size, dtype=torch.bfloat16) for size in (WIDTH, HIDDEN))
    namespace = "aten" if torch.bfloat16 in Processor.here().gemms else NAMESPACE
    return workspace(f"{namespace}::mm", [gradient.T, gelu], torch.get_num_threads())
