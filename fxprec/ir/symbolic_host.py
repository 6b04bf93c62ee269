"""Operators that move what is saved for backward to host memory and back: the way ``offload`` of a peak budget.

``offload(x) -> host``
    ``x`` in host memory, pinned where ``x`` is on a GPU; ``x`` lies densely, and the copy has its strides.
``reload(host, table) -> x``
    What was moved, on the device of the scale table.

Both copy on the stream they are called on: what runs behind an offload may free ``x``, and what runs behind a reload
may read its result, and nobody waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec.ir.calls import Call


@dataclass(frozen=True)
class Offload(Call, op="offload"):
    x: Node


@Offload.fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="cpu")


@dataclass(frozen=True)
class Reload(Call, op="reload"):
    host: Node
    table: Node


@Reload.fake
def _(host: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(host, device=table.device)


OFFLOAD = Offload.target
RELOAD = Reload.target
