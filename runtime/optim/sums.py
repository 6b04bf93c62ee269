"""What stands at ``p.grad`` of a parameter whose gradients are summed in bfloat16 (option ``gradients``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxprec import compat
from fxprec.numerics.formats import BF16
from fxprec.runtime.optim import scalars
from fxprec.runtime.optim.rule import Rule

_PATH = 1 << 40
"""Tells the place of a sum's random bits from that of a weight's."""
_ADD = {"lr": -1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}


class SummedGradient(Tensor):
    """Gradients of one or more backward passes, summed: a bfloat16 tensor that has its parameter's dtype for readers.

    Operators read it as a tensor of that dtype. What writes in place is rounded to nearest.
    """

    held: Tensor
    count: int
    """Gradients added so far."""

    @staticmethod
    def __new__(cls, parameter: Tensor, held: Tensor | None = None, count: int = 0) -> SummedGradient:
        found = Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        found.held = torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False) if held is None else held
        found.count = count
        return found

    __torch_function__ = compat.without_torch_function

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SummedGradient({self.held}, of {self.count} gradients)"

    def __deepcopy__(self, memo: dict[int, Any]) -> SummedGradient:
        return SummedGradient(self, self.held.clone(), self.count)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return SummedGradient(args[0], args[0].held, args[0].count)
        read: dict[int, tuple[SummedGradient, Tensor]] = {}

        def wide(held: SummedGradient) -> Tensor:
            return read.setdefault(id(held), (held, held.held.to(held.dtype)))[1]

        args, kwargs = compat.tree_map_only(SummedGradient, wide, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            for held, changed in read.values():
                held.held.copy_(changed)
        own = {id(changed): held for held, changed in read.values()}
        return compat.tree_map_only(Tensor, lambda t: own.get(id(t), t), result)


def stored(gradient: Tensor) -> Tensor:
    """Return a gradient as it lies in memory."""
    return gradient.held if isinstance(gradient, SummedGradient) else gradient


def adding(dtype: torch.dtype) -> Rule:
    """Return the rule that adds a gradient of this dtype to a sum: a step of SGD at a learning rate of -1.

    The float32 sum is rounded stochastically.
    """
    return Rule("sgd", "stochastic", BF16, torch.bfloat16, gradient=dtype, states="float32")


def numbers(rule: Rule, seed: int, place: Sequence[int], count: int, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return scalars and integers of one addition, the ``count``-th since step ``steps`` (float32 (1,)) of a parameter.

    The random bits are a function of seed, parameter, step and count.
    """
    path = (*place, _PATH, count)
    return scalars.floats(rule, _ADD, steps), scalars.integers(seed, [path], steps)
