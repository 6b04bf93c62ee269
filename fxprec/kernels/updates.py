"""The operator that steps one parameter inside of the backward half, for option ``optimizer``.

``apply_update(parameter, gradient) -> (0,)``
    The optimizer steps ``parameter`` and its state in place. No graph has the state, so nothing there reads it. Which
    optimizer is found at run time: code in a cache knows none. The result is empty; while the joint graph is cut it
    stands where the gradient stood.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from fxprec.ir.calls import Call, Overwritten


@dataclass(frozen=True)
class ApplyUpdate(Call, op="apply_update", fake=lambda call: call.gradient.new_empty(0)):
    """Step a parameter by its gradient, in place."""

    parameter: Overwritten
    gradient: Node
