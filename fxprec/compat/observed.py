"""Observe torch on a GPU, for checks: operators that run, CUDA graphs recorded and skipped, 8-bit products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.utils import counters
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


def recorded_cuda_graphs(device: torch.device) -> int:
    """Return the number of root CUDA graphs that ``mode="reduce-overhead"`` has recorded on a device."""
    if device.type != "cuda":
        return 0
    from torch._inductor.cudagraph_trees import get_manager

    index = torch.cuda.current_device() if device.index is None else device.index
    manager = get_manager(index, create_if_none_exists=False)
    return 0 if manager is None else sum(map(len, manager.roots.values()))


def skipped_cuda_graphs() -> int:
    """Return how many graphs Inductor compiled without CUDA graphs although these were requested."""
    return int(counters["inductor"]["cudagraph_skips"])


def forget_counts() -> None:
    """Reset torch's counters of compilations."""
    counters.clear()


def compiling_anew() -> AbstractContextManager[object]:
    """Switch AOTAutograd's cache off inside the context, so that every graph is compiled."""
    patch: AbstractContextManager[object] = torch._functorch.config.patch(enable_autograd_cache=False)
    return patch


def scaled_mm(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return ``torch._scaled_mm`` of two matrices of 8-bit floats."""
    return torch._scaled_mm(a, b, **options)


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operators_of(function: Callable[[], object]) -> frozenset[str]:
    """Call a function and return the names of the ATen operators that ran."""
    with _Seen() as seen:
        function()
    return frozenset(seen.names)
