"""torch's module_db, its modules as operators of op_db: parameters and buffers are operands, and so behind the Linear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sample:
    """What `exercise` reads of one of op_db's samples."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Module:
    """A module class as a function of its inputs, parameters and buffers."""

    info: Any
    name: str = field(init=False)
    variant_test_name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.info.name)

    def __call__(self, *inputs: Any, module: nn.Module, tensors: Mapping[str, Tensor], **named: Any) -> Any:
        return torch.func.functional_call(module, dict(tensors), inputs, named)

    def sample_inputs(self, device: str, dtype: torch.dtype, *, requires_grad: bool) -> Iterator[Sample]:
        """Yield the samples that module_db has for training."""
        made = self.info.module_inputs_func(self.info, device, dtype, requires_grad, training=True)
        for given in made:
            module = self.info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
            module = module.to(device, dtype).train()
            tensors = {name: p.detach().requires_grad_(requires_grad) for name, p in module.named_parameters()}
            tensors |= dict(module.named_buffers())
            named = dict(given.forward_input.kwargs)
            first, *rest = given.forward_input.args or [named.pop("input")]
            yield Sample(first, tuple(rest), {**named, "module": module, "tensors": tensors})


def modules() -> list[Module]:
    """Return the modules of module_db whose parameters are made with them. Raises `ImportError` without expecttest."""
    from torch.testing._internal.common_modules import module_db

    return [Module(info) for info in module_db if not info.is_lazy and torch.float32 in info.supported_dtypes("cpu")]
