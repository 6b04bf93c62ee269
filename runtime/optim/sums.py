"""Sum a parameter's gradients in bfloat16 at its ``p.grad`` (option ``gradients``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxprec import compat
from fxprec.numerics.formats import BF16
from fxprec.runtime.optim import running, scalars
from fxprec.runtime.optim.rule import Rule

_PATH = 1 << 40
"""Part of the place of a sum's random bits, so that they differ from the weight's."""
_ADD = {"lr": -1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}


class SummedGradient(Tensor):
    """The bfloat16 sum of gradients of one or more backward passes; readers see the dtype of the parameter.

    Operators read it as a tensor of that dtype. Values written in place, to the sum or a view, are rounded to nearest.
    """

    held: Tensor
    count: int
    """Gradients added so far."""

    @staticmethod
    def __new__(cls, held: Tensor, dtype: torch.dtype, count: int = 0) -> SummedGradient:
        found = Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=dtype, device=held.device)
        found.held, found.count = held, count
        return found

    @classmethod
    def of(cls, parameter: Tensor) -> SummedGradient:
        """Return a sum of no gradients."""
        return cls(torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False), parameter.dtype)

    __torch_function__ = compat.without_torch_function

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"SummedGradient({self.held}, of {self.count} gradients)"

    def __deepcopy__(self, memo: object) -> SummedGradient:
        return SummedGradient(self.held.clone(), self.dtype, self.count)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func.is_view and func is not torch.ops.aten.view.dtype:  # so that writing to a view writes to the sum
            held, *others = args
            views = func(held.held, *others, **kwargs)
            return compat.tree_map_only(Tensor, lambda view: SummedGradient(view, held.dtype, held.count), views)
        read: dict[int, tuple[SummedGradient, Tensor]] = {}

        def wide(held: SummedGradient) -> Tensor:
            return read.setdefault(id(held), (held, held.held.to(held.dtype)))[1]

        args, kwargs = compat.tree_map_only(SummedGradient, wide, (args, kwargs))
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            for held, changed in read.values():
                held.held.copy_(changed)
        own = {id(changed): held for held, changed in read.values()}
        return compat.tree_map_only(Tensor, lambda t: own.get(id(t), t), result)


def stored(gradient: Tensor) -> Tensor:
    """Return a gradient as it is stored."""
    return gradient.held if isinstance(gradient, SummedGradient) else gradient


def add(
    to: SummedGradient, gradient: Tensor, group: Mapping[str, Any], place: Sequence[int], step: Tensor | None
) -> None:
    """Add a gradient to a sum by a step of SGD at a learning rate of -1; its float32 result is rounded stochastically.

    ``step``: the parameter's steps so far, None for 0. The random bits are a function of the group's seed, ``place``,
    step and the gradients added before.
    """
    rule = Rule("sgd", "stochastic", BF16, torch.bfloat16, gradient=gradient.dtype, states="float32")
    steps = torch.zeros(1, dtype=torch.float32, device="cpu") if step is None else step.reshape(1).float()
    integers = scalars.integers(group["seed"], [(*place, _PATH, to.count)], steps)
    running.run(rule, group, [[to.held, gradient]], scalars.floats(rule, _ADD, steps), integers, [])
    to.count += 1
