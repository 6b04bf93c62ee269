"""Whether a training step fits a number of bytes, and the largest batch that does: planned, nothing is allocated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fxprec import compat
from fxprec.config import Config
from fxprec.driver.backend import Backend
from fxprec.errors import BudgetError, ConfigError
from fxprec.passes.analysis.peak.reserve import ALLOWANCE
from fxprec.plan import Plan
from fxprec.report.plan_taker import PlanTaker
from fxprec.report.target import Factory, plan_under_fakes
from fxprec.runtime.optim.stepper import Stepper

TRIALS = 10
"""Most plans made to find the largest batch."""
FREE_BYTES = 2 * 32 * 2**20
"""Of a GPU that torch here cannot trace for: what is left free, as `passes.analysis.peak.reserve` does on a GPU."""


@dataclass(frozen=True)
class Answer:
    """What planning one batch found."""

    batch: int
    """Leading dimension of the inputs."""
    budget: int
    """Bytes."""
    reserved: int
    """Bytes of the budget that are left free for libraries."""
    device: str
    """What the model was traced on."""
    plan: Plan | None
    """None where the step does not fit."""
    why: str = ""
    """Why it does not."""
    told: tuple[str, ...] = ()
    """What was asked for and not done, a line each."""

    @property
    def fits(self) -> bool:
        """Whether a plan was found within the memory."""
        return self.plan is not None


@dataclass(frozen=True)
class Question:
    """A model file's factory, the memory there is, and how the step is to run."""

    factory: Factory
    target: str
    budget: int
    optimizer: Callable[[Any], Stepper]
    """Makes the optimizer of parameters."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `Config`."""

    def answer(self, batch: int | None = None) -> Answer:
        """Plan a step. ``batch``: in place of the inputs' own. Raises `ConfigError` for what the factory cannot do."""
        trial = _Trial(self, batch)
        why = ""
        try:
            plan_under_fakes(trial.make, lambda gm, examples: trial.backend(gm, examples), self.target, trial.taker)
        except BudgetError as error:
            why = str(error)
        if not why and not trial.taker.plans:
            raise ConfigError(f"target {self.target!r}: no graph of it trains; let model(*inputs) run with gradients")
        told = tuple(f"{e.site}: {e.detail}" for e in trial.backend.events if e.kind in ("fallback", "limit"))
        plan = None if why else trial.taker.plans[0]
        return Answer(trial.batch, self.budget, trial.reserved, trial.device.type, plan, why, told)


class _Trial:
    """One plan in the making."""

    backend: Backend
    batch: int
    device: torch.device

    def __init__(self, asked: Question, batch: int | None) -> None:
        self.asked, self.wanted, self.taker, self.reserved = asked, batch, PlanTaker(), 0

    def make(self) -> tuple[Any, tuple[Any, ...]]:
        """Return the model and its inputs, and make the backend for them."""
        factory, wanted = self.asked.factory, self.wanted
        takes_batch = wanted is not None and "batch" in inspect.signature(factory).parameters
        made = factory(batch=wanted) if takes_batch else factory()
        if not (isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
            return made  # type: ignore[no-any-return]  # what planning says of it is said there
        model, inputs = made
        inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        own = next((t.shape[0] for t in _tensors(inputs) if t.dim()), 1)
        if wanted is not None and not takes_batch:
            inputs = compat.tree_map_only(torch.Tensor, lambda t: _with_batch(t, own, wanted), inputs)
        inputs = _placed(model, inputs)
        self.batch = own if wanted is None else wanted
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._plan_for(model)
        return model, inputs

    def _plan_for(self, model: torch.nn.Module) -> None:
        asked, options = self.asked, dict(self.asked.options)
        if self.device.type == "cpu":  # its kernels stand for a GPU's: those of one thread take least for themselves
            options["cpu"] = "avx512+bf16:1"
            self.reserved = FREE_BYTES + int(ALLOWANCE * asked.budget)
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise ConfigError(f"target {asked.target!r}: no parameter requires a gradient, so there is no step to plan")
        config = Config(lowering="eager", **options)
        self.optimizer = asked.optimizer(trained)
        room = max(asked.budget - self.reserved, 1)
        self.backend = Backend(config, dump=self.taker, optimizer=self.optimizer, step_budget=room)


def _placed(model: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a model of device "meta" tensors of one that is planned for, and return its inputs so too."""
    if not any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        return inputs
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model._apply(lambda t: torch.empty_like(t, device=device))  # planning has it keep tied parameters tied
    moved: tuple[Any, ...] = compat.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device=device), inputs)
    return moved


def _tensors(inputs: object) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    compat.tree_map_only(torch.Tensor, found.append, inputs)
    return iter(found)


def _with_batch(t: torch.Tensor, own: int, wanted: int) -> torch.Tensor:
    """Return an input of another batch size, where its first dimension is the batch."""
    return t.new_empty((wanted, *t.shape[1:])) if t.dim() and t.shape[0] == own else t


def largest_batch(first: Answer, answer: Callable[[int], Answer]) -> Iterator[Answer]:
    """Yield answers on the way to the largest batch that fits, `TRIALS` at most with the first.

    From the first batch on it is doubled, or halved, until fits and fits not are both known; then the gap is halved.
    """
    fits, not_fits, known = (first.batch, 0, first) if first.fits else (0, first.batch, first)
    yield known
    for _ in range(TRIALS - 1):
        if not_fits - fits == 1:
            return
        batch = 2 * fits if not not_fits else (fits + not_fits) // 2
        found = answer(batch)
        yield found
        fits, not_fits = (batch, not_fits) if found.fits else (fits, batch)
