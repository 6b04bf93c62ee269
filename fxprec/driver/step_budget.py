"""Bound weights, optimizer states and the peak of the graph together by one budget for a whole step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch

from fxprec import compat
from fxprec.errors import BudgetError, ConfigError, either
from fxprec.passes.analysis.inputs import GraphInput
from fxprec.passes.notice import SMALLER_BATCH, STEP_IN_BACKWARD, readable
from fxprec.plan.rows import WholeStep
from fxprec.runtime.optim.all_optimizers import AllOptimizers
from fxprec.runtime.optim.local import local
from fxprec.runtime.optim.rule import STATES, States


@dataclass(frozen=True)
class StepBudget:
    """A budget for one graph's step, and the bytes that stay in memory throughout the step."""

    asked: int
    weights: int
    """Bytes of the graph's parameters and buffers, and of all other parameters of the optimizers."""
    optimizers: AllOptimizers
    chosen: States | None = None
    """The form chosen for optimizer states with states='auto'; None if there are none."""
    is_last: bool = True
    """Whether no smaller form is left to try."""

    @classmethod
    def of(cls, asked: int, optimizers: AllOptimizers, inputs: Sequence[GraphInput], args: Sequence[object]) -> Self:
        """Count the bytes of tensors, or of this rank's shards, once per storage. Open states are not chosen yet."""
        kept = [arg for known, arg in zip(inputs, args, strict=False) if known.kind in ("param", "buffer")]
        held = [param for group in optimizers.param_groups for param in group["params"]]
        tensors = [local(x) for x in (*kept, *held) if isinstance(x, torch.Tensor)]
        return cls(asked, compat.storage_bytes(tensors, (), device=None), optimizers)

    @cached_property
    def states(self) -> int:
        """Bytes of the optimizers' states from the first step on."""
        return self.optimizers.state_bytes(self.chosen)

    @cached_property
    def gradients(self) -> int:
        """Bytes of gradients that the optimizers sum in bfloat16, from the first backward on."""
        return self.optimizers.gradient_bytes()

    def first_that_fits(self, compile_within: Callable[[Self], None]) -> None:
        """Compile with each form of open states, the exact form first, until the step fits; fix the optimizers' form.

        Raises the `BudgetError` of the smallest form if none fits.
        """
        forms: Sequence[States | None] = STATES if self.optimizers.has_open_states else (None,)
        for form in forms:
            tried = replace(self, chosen=form, is_last=form == forms[-1])
            try:
                tried._compile(compile_within)
            except BudgetError:
                if tried.is_last:
                    raise
            else:
                if form is not None:
                    self.optimizers.close_states(form)
                return

    def _compile(self, compile_within: Callable[[Self], None]) -> None:
        """Compile within the bytes left; if none are left, within 1 byte with the last form, to find what suffices."""
        nothing = BudgetError(f"{self.said()}, and nothing is left for the step; raise it")
        if self.left <= 0 and not self.is_last:
            raise nothing
        try:
            compile_within(self if self.left > 0 else replace(self, asked=self.throughout + 1))
        except BudgetError as error:
            if not error.enough:
                raise
            enough = self.throughout + error.enough
            fixed = (STEP_IN_BACKWARD, *([SMALLER_BATCH] if self.throughout > error.enough else []))
            others = (way for way in error.ways if way not in fixed)
            ways = either(f"raise it to {readable(enough)}", *self._fewer(), *others)
            whole = BudgetError(f"{self.said()}; in addition to these {error.found}; {ways}")
            whole.enough = enough
            raise whole from None
        if self.left <= 0:  # reached with a given plan, which compiles whatever the budget
            raise nothing

    @property
    def throughout(self) -> int:
        """Bytes that stay in memory throughout the step."""
        return self.for_plan.throughout

    @property
    def left(self) -> int:
        """Bytes left for the rest of the step: activations, other gradients, temporaries."""
        return self.asked - self.throughout

    @property
    def for_plan(self) -> WholeStep:
        """The bytes of each part of the step, as plan files store them."""
        return WholeStep(
            budget=self.asked,
            weights=self.weights,
            states=self.states,
            chosen=self.chosen or "",
            gradients=self.gradients,
        )

    def said(self) -> str:
        """Return a text with the budget and the bytes that stay in memory throughout the step."""
        states = f"optimizer states {readable(self.states)}"
        states += f" in {self.chosen} (states='auto')" if self.chosen else ""
        states += f", gradients in bf16 {readable(self.gradients)}" if self.gradients else ""
        return f"step_budget is {readable(self.asked)}; weights take {readable(self.weights)}, {states}"

    def _fewer(self) -> Iterator[str]:
        """Yield options, as text, that keep weights and states in fewer bytes."""
        sizes = {form: self.optimizers.state_bytes(form, of_all=True) for form in STATES[2:]}
        fewer = [f"{form!r}, which take {readable(size)}" for form, size in sizes.items() if size < self.states]
        if fewer:
            yield f"give the optimizer states={', or '.join(fewer)}"
        if any(p.dtype.itemsize > 2 for group in self.optimizers.param_groups for p in group["params"]):
            yield "hold weights in bfloat16 (update='stochastic')"


def refuse_beside(optimizer: object, peak_budget: object) -> None:
    """Raise `ConfigError` if a step budget has no optimizer, or a peak budget beside it."""
    if optimizer is None:
        raise ConfigError(
            "step_budget counts weights and optimizer states, and no optimizer is given; give option optimizer too, or "
            "peak_budget, which counts neither"
        )
    if peak_budget is not None:
        raise ConfigError(
            "step_budget and peak_budget are both given, and step_budget sets the peak budget to what weights and "
            "states leave; keep one of them, drop the other"
        )
