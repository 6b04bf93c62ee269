"""Find whether a training step fits in given bytes, and the largest batch and sequence that fit, without allocating."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxprec import compat
from fxprec.config import Config
from fxprec.driver.backend import Backend
from fxprec.errors import BudgetError, ConfigError
from fxprec.passes.crossings.reserve import ALLOWANCE
from fxprec.passes.notice import readable
from fxprec.plan import Plan
from fxprec.report.plan_taker import PlanTaker
from fxprec.report.target import Factory, plan_under_fakes
from fxprec.runtime.optim.stepper import Stepper

TRIALS = 10
"""Most plans made to find the largest batch, or the longest sequence."""
TOKENS = 64
"""A search tries only multiples of this many tokens if the first sequence is a multiple."""
FREE_BYTES = 2 * 32 * 2**20
"""Bytes left free for a GPU that this machine does not have; `passes.crossings.reserve` leaves as many."""


@dataclass(frozen=True)
class Answer:
    """The result of planning one step for a given memory."""

    batch: int
    """Leading dimension of the inputs."""
    sequence: int
    """Second dimension of the inputs; 1 if the first input has only one."""
    budget: int
    """The given memory, in bytes."""
    reserved: int
    """Bytes of the budget that are left free for libraries."""
    device: str
    """Type of the device that the model was traced on."""
    plan: Plan | None
    """None if the step does not fit."""
    why: str = ""
    """Why the step does not fit."""
    enough: int = 0
    """Bytes in which the step would fit; 0 if unknown."""
    told: tuple[str, ...] = ()
    """One line for each request that was not fulfilled, and for each limit."""

    @property
    def fits(self) -> bool:
        """Whether a plan was found within the memory."""
        return self.plan is not None


@dataclass(frozen=True)
class Question:
    """A model file's factory, the memory, and the options and optimizers of the step."""

    factory: Factory
    target: str
    budget: int
    optimizers: Callable[[torch.nn.Module], Sequence[Stepper]]
    """Makes the optimizers of a model's trainable parameters."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `Config`."""

    def answer(self, batch: int | None = None, sequence: int | None = None) -> Answer:
        """Plan a step. ``batch`` and ``sequence`` replace the inputs' own first and second dimension.

        Raises `ConfigError` if the factory cannot make such inputs, or if no graph trains.
        """
        trial = _Trial(self, {"batch": batch, "sequence": sequence})
        why, enough = "", 0
        try:
            plan_under_fakes(trial.make, lambda gm, examples: trial.backend(gm, examples), self.target, trial.taker)
        except BudgetError as error:
            free = f"{readable(trial.reserved)} stay free for libraries; in the rest: " if trial.reserved else ""
            why, enough = f"{free}{error}", trial.memory_for(error.enough)
        if not why and not trial.taker.plans:
            raise ConfigError(f"target {self.target!r}: no graph of it trains; let model(*inputs) run with gradients")
        plan = None if why else trial.taker.plans[0]
        size, length = trial.sizes
        return Answer(size, length, self.budget, trial.reserved, trial.device.type, plan, why, enough, trial.taker.told)


class _Trial:
    """One attempt to plan a step of given sizes."""

    backend: Backend
    sizes: Sequence[int]
    """Batch and sequence."""
    device: torch.device

    def __init__(self, asked: Question, wanted: Mapping[str, int | None]) -> None:
        self.asked, self.taker, self.reserved = asked, PlanTaker(), 0
        self.wanted = {name: size for name, size in wanted.items() if size is not None}

    def make(self) -> tuple[Any, tuple[Any, ...]]:
        """Return the model and its inputs, and make the backend for them."""
        factory, wanted = self.asked.factory, self.wanted
        taken = {name: wanted[name] for name in inspect.signature(factory).parameters if name in wanted}
        made = factory(**taken)
        if not (isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
            return made  # type: ignore[no-any-return]  # planning raises the error for it
        model, inputs = made
        if not isinstance(inputs, tuple | list | Mapping):
            inputs = (inputs,)
        shape = next((t.shape for t in _tensors(inputs) if t.dim()), torch.Size())
        if "sequence" in wanted and "sequence" not in taken and not 2 <= len(shape) <= 3:
            raise ConfigError(
                f"target {self.asked.target!r}: its first input has {len(shape)} dimensions, so the second is not a "
                "sequence length that can be changed; give the factory a parameter named sequence"
            )
        self.sizes = [*shape[:2], 1, 1][:2]
        for dim, name in enumerate(("batch", "sequence")):
            size = wanted.get(name, self.sizes[dim])
            if name not in taken:
                inputs = _resized(inputs, dim, self.sizes[dim], size)
            self.sizes[dim] = size
        inputs = _placed(model, inputs)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._plan_for(model)
        return model, inputs

    def _plan_for(self, model: torch.nn.Module) -> None:
        asked, options = self.asked, dict(self.asked.options)
        if self.device.type == "cpu":  # the CPU stands for a GPU: with one thread its kernels need the least workspace
            options["cpu"] = "avx512+bf16:1"
            self.reserved = FREE_BYTES + int(ALLOWANCE * asked.budget)
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(f"target {asked.target!r}: no parameter requires a gradient, so there is no step to plan")
        config = Config(lowering="eager", **options)
        self.optimizers = asked.optimizers(model)
        room = max(asked.budget - self.reserved, 1)
        self.backend = Backend(config, dump=self.taker, optimizer=self.optimizers, step_budget=room)

    def memory_for(self, enough: int) -> int:
        """Return the total bytes that leave ``enough`` bytes for the step; 0 for 0."""
        return math.ceil((enough + FREE_BYTES) / (1 - ALLOWANCE)) if enough and self.reserved else enough


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


def largest_batch(first: Answer, answer: Callable[[int], Answer]) -> Iterator[Answer]:
    """Yield the answers of a search for the largest batch that fits; see `_largest`."""
    return _largest(first, first.batch, 1, answer)


def longest_sequence(first: Answer, answer: Callable[[int], Answer]) -> Iterator[Answer]:
    """Yield the answers of a search for the longest sequence that fits; see `_largest` and `TOKENS`."""
    return _largest(first, first.sequence, 1 if first.sequence % TOKENS else TOKENS, answer)


def _largest(first: Answer, size: int, step: int, answer: Callable[[int], Answer]) -> Iterator[Answer]:
    """Yield the answers of a search for the largest multiple of ``step`` that fits, at most `TRIALS` answers.

    The size is doubled or halved until one size fits and one does not. Bisection between the two follows.
    """
    tried = size // step
    fits, not_fits = (tried, 0) if first.fits else (0, tried)
    yield first
    for _ in range(TRIALS - 1):
        if not_fits - fits == 1:
            return
        tried = 2 * fits if not not_fits else (fits + not_fits) // 2
        found = answer(tried * step)
        yield found
        fits, not_fits = (tried, not_fits) if found.fits else (fits, tried)
