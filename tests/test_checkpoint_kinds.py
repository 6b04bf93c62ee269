"""Every way to checkpoint a module: what is saved of it is what it starts from, and what its policy saves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from backend_helpers import eager_backend, relative_error
from models import FeedForward
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ROWS, WIDTH, HIDDEN, BLOCKS = 64, 32, 128, 2
BOUNDARY = 2 * ROWS * WIDTH  # bytes, in bfloat16
aten = torch.ops.aten


def save_gemms(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_gemm = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_gemm else CheckpointPolicy.PREFER_RECOMPUTE


def nested(block: nn.Module, x: Tensor) -> Tensor:
    inner = partial(checkpoint, block, use_reentrant=False)
    return checkpoint(inner, x, use_reentrant=False)  # type: ignore[no-any-return]


selective = partial(
    checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_gemms)
)
KINDS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "non-reentrant": (partial(checkpoint, use_reentrant=False), BOUNDARY),
    "reentrant": (partial(checkpoint, use_reentrant=True), BOUNDARY),
    "nested": (nested, BOUNDARY),
    "selective": (selective, BOUNDARY + 2 * ROWS * HIDDEN),  # what `up` gives; nothing reads what `down` gives
    "checkpoint_wrapper": (checkpoint_wrapper, BOUNDARY),
    "checkpoint_wrapper, reentrant": (
        partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
        BOUNDARY,
    ),
}


class Network(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(WIDTH, HIDDEN) for _ in range(BLOCKS))
        self.call = KINDS[kind][0]
        if kind.startswith("checkpoint_wrapper"):
            self.blocks = nn.ModuleList(self.call(block) for block in self.blocks)
            self.call = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_region_its_start_is_saved_and_what_its_policy_saves(kind: str) -> None:
    model, x, weights = Network(kind), torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(WIDTH)
    reference, seen = copy.deepcopy(model), dict[int, int]()
    there_anyway = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}

    def pack(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    backend = eager_backend("native", recipe="fp8", low_ratio=1.0)
    compiled = torch.compile(model, backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = compiled(x)
    (out * weights).sum().backward()
    (reference(x) * weights).sum().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert relative_error(a.grad, b.grad) < 0.01, (
            "bfloat16's error: what is computed again is not rounded to 8 bits"
        )
    saved = backend.plans[0].saved_bytes
    assert saved is not None
    assert saved.planned == BLOCKS * KINDS[kind][1]
    # The scale table is the one other tensor that forward hands to backward.
    handed = sum(size for place, size in seen.items() if place not in there_anyway)
    assert handed == saved.planned + backend.controllers[0].table.untyped_storage().nbytes()
