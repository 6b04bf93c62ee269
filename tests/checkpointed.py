"""Checkpointed regions, and a call under a fixed seed, for the tests of checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._inductor.config
from backend_helpers import compare, eager_backend
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fxprec import Backend

Region = Callable[[Tensor, Tensor], Any]
SIDE = 16

region = partial(checkpoint, use_reentrant=False)


def selective(save: set[Any], rest: CheckpointPolicy = CheckpointPolicy.PREFER_RECOMPUTE) -> Callable[..., Any]:
    """Return `checkpoint` with a policy that saves these operators."""

    def chosen(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in save else rest

    return partial(region, context_fn=partial(create_selective_checkpoint_contexts, chosen))


def seeded(model: nn.Module, x: Tensor) -> Any:
    torch.manual_seed(1)
    return model(x)


class Two(nn.Module):
    """A region between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> Any:
        return region(self.part, self.first(x))

    def part(self, x: Tensor) -> Any:
        return self.second(x).tanh()


def agree(made: Callable[[], nn.Module], *, fullgraph: bool = True, **options: Any) -> Backend:
    """Train two steps, compiled and not; return the backend."""
    torch.compiler.reset()
    torch.manual_seed(0)
    backend = eager_backend("packed", low_ratio=1.0)
    batches = options.pop("batches", [(torch.randn(SIDE, SIDE),)] * 2)
    with torch._inductor.config.patch(fallback_random=True):
        compare(made, batches, backend, call=seeded, input_gradients=True, fullgraph=fullgraph, **options)
    assert backend.plans
    return backend
