"""Operators that move saved tensors to host memory and back: the way ``offload`` of a peak budget.

``offload(x) -> host``
    A copy of ``x`` in host memory, pinned if ``x`` is on a GPU. ``x`` is dense, and the copy has its strides.
``wait_offload(host, x) -> host``
    The copy, once it is complete. ``x`` lives until then; later kernels may reuse its memory.
``reload(host, table) -> x``
    A copy back on the device of the scale table; it is only begun.
``wait_reload(x) -> x``
    The copy back, once it is complete; later kernels may read it.

On a GPU the copies run on a separate stream, and the waits are events between streams: the host never waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, Shown


def _alias(x: object) -> Any:
    return torch.ops.aten.alias.default(x)


class Offload(Call, op="offload", fake=lambda call: torch.empty_like(call.x, device="cpu")):
    """Copy a tensor to host memory; on a GPU only begin the copy."""

    x: Node


class WaitOffload(Call, op="wait_offload", fake=lambda call: _alias(call.host), returns="Tensor(a)"):
    """Wait for the copy to the host; afterwards the tensor's memory may be reused."""

    host: Shown
    x: Node


class Reload(Call, op="reload", fake=lambda call: torch.empty_like(call.host, device=call.table.device)):
    """Copy a tensor back to the device; on a GPU only begin the copy."""

    host: Node
    table: Node


class WaitReload(Call, op="wait_reload", fake=lambda call: _alias(call.x), returns="Tensor(a)"):
    """Wait for the copy back; afterwards the tensor may be read."""

    x: Shown


IN_PLACE_ORDER = frozenset({Offload.target, WaitOffload.target, Reload.target})
"""Copies and waits that must stay at their place in the plan: the next kernel comes after them."""
