"""Operators that move saved tensors to host memory and back: the way ``offload`` of a peak budget.

On a GPU the copies run on a separate stream, and the waits are events between streams: the host never waits.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, Shown


def _alias(x: object) -> object:
    return torch.ops.aten.alias.default(x)


class Offload(Call, op="offload", fake=lambda call: torch.empty_like(call.x, device="cpu")):
    """Copy a dense tensor to host memory, with its strides; from a GPU to pinned memory, and only begin the copy."""

    x: Node


class WaitOffload(Call, op="wait_offload", fake=lambda call: _alias(call.host), returns="Tensor(a)"):
    """Wait for the copy to the host, and return it. ``x`` lives until then; later kernels may reuse its memory."""

    host: Shown
    x: Node


class Reload(Call, op="reload", fake=lambda call: torch.empty_like(call.host, device=call.table.device)):
    """Copy a tensor back to the device of the scale table; on a GPU only begin the copy."""

    host: Node
    table: Node


class WaitReload(Call, op="wait_reload", fake=lambda call: _alias(call.x), returns="Tensor(a)"):
    """Wait for the copy back, and return it; later kernels may read it."""

    x: Shown


IN_PLACE_ORDER = frozenset({Offload.target, WaitOffload.target, Reload.target})
"""Copies and waits that must stay at their place in the plan: the next kernel comes after them."""
