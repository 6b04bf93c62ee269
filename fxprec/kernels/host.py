"""Operators that move what is saved for backward to host memory and back: the way ``offload`` of a peak budget.

``offload(x) -> host``
    ``x`` in host memory, pinned where ``x`` is on a GPU; ``x`` lies densely, and the copy has its strides.
``wait_offload(host, x) -> host``
    What was moved, once its copy is done: ``x`` lives until then, and what runs behind may reuse its memory.
``reload(host, table) -> x``
    What was moved, on its way back to the device of the scale table.
``wait_reload(x) -> x``
    What came back: what runs behind may read it.

On a GPU the copies run on a stream of their own, and the waits are events between streams: nobody waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, Shown


def _alias(x: object) -> Any:
    return torch.ops.aten.alias.default(x)


@dataclass(frozen=True)
class Offload(Call, op="offload", fake=lambda call: torch.empty_like(call.x, device="cpu")):
    """Copy a tensor to host memory; on a GPU the copy is only begun."""

    x: Node


@dataclass(frozen=True)
class WaitOffload(Call, op="wait_offload", fake=lambda call: _alias(call.host), returns="Tensor(a)"):
    """Wait for the copy to the host; afterwards the tensor's memory may be used again."""

    host: Shown
    x: Node


@dataclass(frozen=True)
class Reload(Call, op="reload", fake=lambda call: torch.empty_like(call.host, device=call.table.device)):
    """Copy a tensor back to the device; on a GPU the copy is only begun."""

    host: Node
    table: Node


@dataclass(frozen=True)
class WaitReload(Call, op="wait_reload", fake=lambda call: _alias(call.x), returns="Tensor(a)"):
    """Wait for the copy back; afterwards the tensor may be read."""

    x: Shown


OFFLOAD = Offload.target
WAIT_OFFLOAD = WaitOffload.target
RELOAD = Reload.target
IN_PLACE_ORDER = frozenset({OFFLOAD, WAIT_OFFLOAD, RELOAD})
"""Copies that begin, and waits that end, where the plan has them: the next kernel comes after them."""
