"""Make a model and its inputs with another batch, or sequence, than the factory's own, without allocating."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fxprec import compat
from fxprec.errors import ConfigError
from fxprec.report.target import Factory


def sized(factory: Factory, target: str, wanted: Mapping[str, int]) -> tuple[Any, tuple[int, int] | None]:
    """Return what the factory makes, and the first two dimensions of its first input; None if it makes no model.

    ``wanted``: ``batch`` and ``sequence`` that replace these dimensions. They are given to a factory that has
    parameters of these names; else its inputs are resized. Raises `ConfigError` if the second dimension is no sequence.
    """
    taken = {name: wanted[name] for name in inspect.signature(factory).parameters if name in wanted}
    made = factory(**taken)
    if not (isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        return made, None
    model, inputs = made
    if not isinstance(inputs, tuple | list | Mapping):
        inputs = (inputs,)
    shape = next((t.shape for t in _tensors(inputs) if t.dim()), torch.Size())
    if "sequence" in wanted and "sequence" not in taken and not 2 <= len(shape) <= 3:
        raise ConfigError(
            f"target {target!r}: its first input has {len(shape)} dimensions, so the second is not a sequence length "
            "that can be changed; give the factory a parameter named sequence"
        )
    sizes = [*shape[:2], 1, 1][:2]
    for dim, name in enumerate(("batch", "sequence")):
        size = wanted.get(name, sizes[dim])
        if name not in taken:
            inputs = _resized(inputs, dim, sizes[dim], size)
        sizes[dim] = size
    return (model, _placed(model, inputs)), (sizes[0], sizes[1])


def _placed(model: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move a "meta" model to a device that fxprec can plan for, in place, and return its inputs on that device."""
    if not any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        return inputs
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model._apply(lambda t: torch.empty_like(t, device=device))  # planning patches it to keep tied parameters tied
    moved: tuple[Any, ...] = compat.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device=device), inputs)
    return moved


def _tensors(inputs: object) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    compat.tree_map_only(torch.Tensor, found.append, inputs)
    return iter(found)


def _resized(inputs: tuple[Any, ...], dim: int, own: int, wanted: int) -> tuple[Any, ...]:
    """Return inputs with dimension ``dim`` resized from ``own`` to ``wanted``; tensors of other length stay."""

    def resized(t: torch.Tensor) -> torch.Tensor:
        if t.dim() <= dim or t.shape[dim] != own or own == wanted:
            return t
        return t.new_empty((*t.shape[:dim], wanted, *t.shape[dim + 1 :]))

    found: tuple[Any, ...] = compat.tree_map_only(torch.Tensor, resized, inputs)
    return found
