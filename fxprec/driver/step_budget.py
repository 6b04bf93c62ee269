"""One budget for a whole step: it bounds weights, optimizer states and the peak of the graph together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from fxprec.errors import BudgetError, ConfigError
from fxprec.passes.analysis.inputs import GraphInput
from fxprec.passes.notice import readable
from fxprec.runtime.optim.local import local
from fxprec.runtime.optim.stepper import Stepper


@dataclass(frozen=True)
class StepBudget:
    """What is there throughout a step of one graph, of the bytes asked for."""

    asked: int
    weights: int
    """Bytes of the graph's parameters and buffers, and of what else the optimizer holds."""
    states: int
    """Bytes that the optimizer's states take from the first step on."""
    states_in_8_bits: int

    @classmethod
    def of(cls, asked: int, optimizer: Stepper, inputs: Sequence[GraphInput], args: Sequence[object]) -> Self:
        """Count the memory of tensors and of this rank's shards once. Raises `BudgetError` where nothing is left."""
        kept = [arg for known, arg in zip(inputs, args, strict=False) if known.kind in ("param", "buffer")]
        held = [param for group in optimizer.param_groups for param in group["params"]]
        storages = (local(x).untyped_storage() for x in (*kept, *held) if isinstance(x, torch.Tensor))
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        found = cls(asked, sum(sizes.values()), optimizer.state_bytes(), optimizer.state_bytes("8bit"))
        if found.left <= 0:
            raise BudgetError(f"{found.said()}, and nothing is left for the step; {found._way_out()}")
        return found

    @property
    def left(self) -> int:
        """Bytes that the rest of the step may hold: activations, gradients, temporaries."""
        return self.asked - self.weights - self.states

    def said(self) -> str:
        """Say what is there throughout the step."""
        states = f"optimizer states {readable(self.states)}"
        return f"step_budget is {readable(self.asked)}; weights take {readable(self.weights)}, {states}"

    def refused(self, error: BudgetError) -> BudgetError:
        """Return the error of a graph that does not fit what is left."""
        return BudgetError(f"{self.said()}. Of the rest, {error}. {self._way_out().capitalize()}")

    def _way_out(self) -> str:
        ways = ["raise it", "hold weights in bfloat16 (update='stochastic')"]
        if self.states_in_8_bits < self.states:
            ways.insert(1, f"give the optimizer states='8bit', which take {readable(self.states_in_8_bits)}")
        return ", or ".join(ways)


def refuse_beside(optimizer: object, peak_budget: object) -> None:
    """Raise `ConfigError` where a step budget lacks an optimizer, or has a second budget beside it."""
    if optimizer is None:
        raise ConfigError(
            "step_budget counts weights and optimizer states, and no optimizer is given; give option optimizer too, or "
            "peak_budget, which counts neither"
        )
    if peak_budget is not None:
        raise ConfigError(
            "step_budget and peak_budget are both given, and step_budget gives the peak what weights and states leave; "
            "keep one of them, drop the other"
        )
