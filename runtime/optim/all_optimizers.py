"""Treat all optimizers that a model is compiled with as one: a parameter is stepped by the optimizer that has it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from fxprec.errors import ConfigError, GradientError
from fxprec.runtime.optim.rule import States
from fxprec.runtime.optim.stepper import Stepper


class AllOptimizers:
    """The optimizers of one model, referenced weakly."""

    def __init__(self, optimizers: Sequence[Stepper]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]

    def __iter__(self) -> Iterator[Stepper]:
        """Yield the optimizers. Raises `GradientError` if one is gone."""
        for reference in self._optimizers:
            found = reference()
            if found is None:
                raise GradientError(
                    "option optimizer: the optimizer that the model was compiled with was deleted, and backward steps "
                    "its parameters; keep a reference to it, or compile the model again with another"
                )
            yield found

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the param groups of all optimizers, in order."""
        return [group for optimizer in self for group in optimizer.param_groups]

    @property
    def has_open_states(self) -> bool:
        """Return whether any optimizer leaves the form of its averages to a step budget."""
        return any(optimizer.has_open_states for optimizer in self)

    def close_states(self, form: States) -> None:
        """Keep averages whose form was left open in ``form`` from now on."""
        for optimizer in self:
            optimizer.close_states(form)

    def state_bytes(self, form: States | None = None, *, of_all: bool = False) -> int:
        """Return the bytes of all optimizers' states, counted as in `Stepper.state_bytes`."""
        return sum(optimizer.state_bytes(form, of_all=of_all) for optimizer in self)

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients that are summed in bfloat16."""
        return sum(optimizer.gradient_bytes() for optimizer in self)

    def sums_gradients(self, param: Tensor) -> bool:
        """Return whether a parameter's gradients are summed in bfloat16 until its optimizer steps the parameter."""
        return any(optimizer.sums_gradients(param) for optimizer in self)

    def holder_of(self, param: Tensor) -> Stepper:
        """Return the optimizer that has a parameter. Raises `ConfigError` if none has it any longer."""
        for optimizer in self:
            if optimizer.position_of(param) is not None:
                return optimizer
        raise ConfigError("the optimizer no longer holds a parameter that backward steps; compile the model again")
