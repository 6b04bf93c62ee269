"""The sides: compiled bf16 autocast, and recipes of fxprec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import fxprec

FLOAT32, AUTOCAST = "float32", "autocast"
_RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": "bf16"},
    "fp8 0.5": {"recipe": "fp8", "low_ratio": 0.5},
    "fp8 1": {"recipe": "fp8", "low_ratio": 1.0},
    "hfp8 packed 1": {"recipe": "hfp8", "storage": "packed", "low_ratio": 1.0},
}
SIDES: dict[str, dict[str, Any]] = {AUTOCAST: {}} | {f"{name} high": options for name, options in _RECIPES.items()}
"""Options of `fxprec.Config` by name of the side; none for autocast. Float32, the reference, is no side of its own."""


@dataclass(frozen=True)
class Compiled:
    """A compiled model; ``backend`` is fxprec's, or None."""

    model: Callable[..., Any]
    backend: fxprec.Backend | None = None
    is_autocast: bool = False

    def forward(self, loss_of: Callable[[Any], Tensor]) -> Tensor:
        """Return the loss, under autocast where the side is that."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_autocast):
            return loss_of(self.model)


def available() -> list[str]:
    """Return the sides whose options this fxprec has."""
    known = {field.name for field in fields(fxprec.Config)}
    return [name for name, options in SIDES.items() if known.issuperset(options)]


def compile_side(
    name: str, model: nn.Module, lowering: str, sides: Mapping[str, dict[str, Any]] = MappingProxyType(SIDES)
) -> Compiled:
    """Compile ``model`` afresh for one of ``sides``.

    With ``lowering`` ``"eager"`` autocast is compiled by ``aot_eager``: each operator rounds what it returns to bf16,
    where Inductor keeps float32 within a kernel, so it rounds as often as Inductor or more.
    """
    torch._dynamo.reset()
    if name in (FLOAT32, AUTOCAST):
        plain = torch.compile(model, backend="aot_eager" if lowering == "eager" else "inductor")
        return Compiled(plain, is_autocast=name == AUTOCAST)
    backend = fxprec.Backend(fxprec.Config.from_options(sides[name] | {"lowering": lowering}))
    return Compiled(torch.compile(model, backend=backend), backend)
