"""What a run of a program gives, and noise to tell how much of a difference rounding explains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.graphs.program import Program, arguments_of


def weighted_sum(outputs: Sequence[Tensor]) -> Tensor:
    """Return a scalar, float64, whose gradient differs for every element of every output."""
    pick = torch.Generator().manual_seed(7)
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        weight = torch.randn(output.shape, generator=pick).double()
        if output.requires_grad:
            total = total + (output.double() * weight).sum()
    return total


def run(
    program: Program, module: nn.Module, called: Callable[..., list[Tensor]], wide: torch.dtype, batch: int
) -> dict[str, Tensor]:
    """Return outputs, gradients of everything that has one, and what was written into, in float64 by name."""
    module.zero_grad()
    arguments = arguments_of(program, wide, batch)
    torch.manual_seed(3)
    outputs = called(*arguments)
    loss = weighted_sum(outputs)
    if loss.requires_grad:
        loss.backward()
    found = {f"output {i} ({name})": x for i, (name, x) in enumerate(zip(program.outputs, outputs, strict=True))}
    named = dict(zip(program.arguments, arguments, strict=True))
    leaves = {**dict(module.named_parameters()), **named}
    found |= {f"gradient of {name}": x.grad for name, x in leaves.items() if x.requires_grad and x.grad is not None}
    found |= {f"{name} afterwards": x for name, x in {**dict(module.named_buffers()), **named}.items()}
    return {name: x.detach().double() for name, x in found.items()}


def distance(got: Tensor, wanted: Tensor) -> float:
    """Return the L2 norm of the difference; infinite for other shapes or numbers that are none."""
    if got.shape != wanted.shape:
        return torch.inf
    found = float((got - wanted).norm())
    return found if found == found else torch.inf


class Noise(TorchDispatchMode):
    """Adds to each result of an operator, forward and backward, a random error of relative size ``unit``."""

    def __init__(self, unit: float, seed: int) -> None:
        super().__init__()
        self.unit, self.pick = unit, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return result
        for x in result if isinstance(result, tuple | list) else [result]:
            if not (isinstance(x, Tensor) and x.is_floating_point() and x.numel()):
                continue
            if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
                x = x.permute(0, 2, 3, 1)
            if x.is_contiguous():
                noise = torch.randn(x.numel(), generator=self.pick, dtype=x.dtype)
                x.view(-1).mul_(1 + self.unit * noise.to(x.device))
        return result
