"""Steps of a training that several tests take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def losses_of(
    call: Callable[..., Tensor],
    optimizer: Any,
    batches: Iterable[Tensor],
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> list[Tensor]:
    """Take a step on each batch; return the losses, means of the outputs' squares."""
    losses = []
    for x in batches:
        loss = call(x).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses
