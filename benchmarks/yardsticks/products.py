"""Matrix products and convolutions in bfloat16, for models that `torch.autocast` refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
PRODUCTS = {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten.convolution,
    aten.convolution_backward,
}


class ProductsInBf16(TorchDispatchMode):
    """Round the float32 operands of each product to bfloat16, those of its gradients too, and its result.

    Autocast rounds the same. It also hands bfloat16 on to the next operators, and these may refuse two dtypes.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in PRODUCTS:
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, _in_bf16, (args, kwargs))
        return tree_map_only(Tensor, _in_float32, func(*args, **kwargs))


def _in_bf16(t: Tensor) -> Tensor:
    return t.bfloat16() if t.dtype == torch.float32 else t


def _in_float32(t: Tensor) -> Tensor:
    return t.float() if t.dtype == torch.bfloat16 else t
