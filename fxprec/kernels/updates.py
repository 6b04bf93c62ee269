"""The operator that steps one parameter inside the backward half, for option ``optimizer``."""

from __future__ import annotations

from torch.fx import Node

from fxprec.ir.calls import Call, Overwritten


class ApplyUpdate(Call, op="apply_update", fake=lambda call: call.gradient.new_empty(0)):
    """Let the optimizer step ``parameter`` and its state in place; the result is empty.

    The state is in no graph, so no other node reads it. The optimizer is looked up at run time, since code from a cache
    refers to none. While the joint graph is partitioned, the result takes the gradient's place among the outputs.
    """

    parameter: Overwritten
    gradient: Node
