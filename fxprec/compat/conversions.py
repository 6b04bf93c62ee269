"""Make conversions of a module work under fake tensors: ``model.bfloat16()``, ``model.to("cuda")``.

torch swaps a fake parameter with its converted copy. The swap fails if a weak reference to either exists, which is
mostly the case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def converting_fakes() -> Iterator[None]:
    """Make module conversions replace parameters by new ones inside the context; tied parameters stay tied."""
    made: dict[
        tuple[int, int], tuple[object, Tensor, Tensor]
    ] = {}  # values keep function and tensor alive, so that their ids stay valid

    def converted(function: Callable[[Tensor], Tensor], own: Tensor) -> Tensor:
        key = id(function), id(own)
        if key not in made:
            with torch.no_grad():
                new = function(own)
            is_parameter = isinstance(own, nn.Parameter)
            new = nn.Parameter(new, own.requires_grad) if is_parameter and new is not own else new
            made[key] = function, own, new
        return made[key][2]

    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> object:
        for child in module.children() if recurse else ():
            child._apply(function)
        for tensors in (module._parameters, module._buffers):
            for name, own in tensors.items():
                if own is not None:
                    tensors[name] = converted(function, own)  # type: ignore[assignment]
        return module

    was = nn.Module._apply
    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = was  # type: ignore[method-assign]
