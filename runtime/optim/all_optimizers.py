"""The optimizers that a model is compiled with, seen as one: each parameter is stepped by the one that holds it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from fxprec.errors import ConfigError, GradientError
from fxprec.runtime.optim.rule import States
from fxprec.runtime.optim.stepper import NOT_HELD, Stepper


class AllOptimizers:
    """Optimizers, none of which this keeps alive."""

    def __init__(self, optimizers: Sequence[Stepper]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]

    def __iter__(self) -> Iterator[Stepper]:
        """Raises `GradientError` where one is gone."""
        for reference in self._optimizers:
            found = reference()
            if found is None:
                raise GradientError(
                    "option optimizer: the optimizer that the model was compiled with is gone, and backward steps its "
                    "parameters; keep it, or compile the model anew with another"
                )
            yield found

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all, in order."""
        return [group for optimizer in self for group in optimizer.param_groups]

    @property
    def has_open_states(self) -> bool:
        """Whether any leaves the form of its averages to a step budget."""
        return any(optimizer.has_open_states for optimizer in self)

    def close_states(self, form: States) -> None:
        """Hold the averages that were left open in this form."""
        for optimizer in self:
            optimizer.close_states(form)

    def state_bytes(self, form: States | None = None, *, of_all: bool = False) -> int:
        """Return the bytes that all states take, as `Stepper.state_bytes`."""
        return sum(optimizer.state_bytes(form, of_all=of_all) for optimizer in self)

    def gradient_bytes(self) -> int:
        """Return the bytes that gradients summed in bfloat16 take."""
        return sum(optimizer.gradient_bytes() for optimizer in self)

    def sums_gradients(self, param: Tensor) -> bool:
        """Say whether gradients of a parameter are summed in bfloat16 until its optimizer steps it."""
        return any(optimizer.sums_gradients(param) for optimizer in self)

    def holder_of(self, param: Tensor) -> Stepper:
        """Return the optimizer that steps a parameter. Raises `ConfigError` where none does any longer."""
        for optimizer in self:
            if optimizer.position_of(param) is not None:
                return optimizer
        raise ConfigError(NOT_HELD)
