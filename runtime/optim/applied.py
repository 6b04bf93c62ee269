"""Stand in at ``p.grad`` of a parameter that backward has stepped: take no memory, and raise an error for readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxprec import compat
from fxprec.errors import GradientError


class AppliedGradient(Tensor):
    """A gradient that is not kept: only its shape, dtype and device. Operators that read it raise `GradientError`."""

    of: str
    by: int
    """The id of the optimizer that stepped the parameter."""

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str, by: int) -> AppliedGradient:
        found = Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        found.of, found.by = name, by
        return found

    __torch_function__ = compat.without_torch_function

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"AppliedGradient({self.of})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> object:
        if _reads_nothing(func):
            return args[0]
        found = next(_found(args), None)
        way_out = _CLIP if "norm" in func._schema.name else _HOLD
        raise GradientError(
            f"the gradient of {'a parameter' if found is None else found.of} is not held: the compiled backward has "
            f"stepped the parameter already (option optimizer); {way_out}"
        )


_HOLD = (
    "do not read p.grad, give the optimizer gradients='bf16', which holds gradients until step(), or compile without "
    "option optimizer"
)
_CLIP = (
    "to clip by the global norm, call no clip_grad_norm_ and give the optimizer max_norm= with norm='last', which "
    "clips in backward by the last step's norm, or with norm='exact', which holds gradients and clips in step()"
)


def _reads_nothing(func: OpOverload) -> bool:
    """Return whether an operator is one that ``zero_grad`` or a copy of the module calls."""
    return func is torch.ops.aten.detach.default or func._schema.name.endswith("zero_")


def _found(args: object) -> Iterator[AppliedGradient]:
    for arg in args if isinstance(args, list | tuple) else ():
        if isinstance(arg, AppliedGradient):
            yield arg
        yield from _found(arg)


def is_held(gradient: Tensor | None) -> bool:
    """Return whether ``p.grad`` is a gradient that a step can apply."""
    return gradient is not None and not isinstance(gradient, AppliedGradient)


def refuse_applied_by_another(optimizer: torch.optim.Optimizer) -> None:
    """Raise `GradientError` if another optimizer has stepped a parameter of this one in backward."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        gradient = parameter.grad
        if isinstance(gradient, AppliedGradient) and gradient.by != id(optimizer):
            raise GradientError(
                f"this {type(optimizer).__name__} has nothing to step: the compiled backward has stepped {gradient.of} "
                "already, by the optimizer that option optimizer has; call that optimizer's step(), or compile again "
                "with this one"
            )
