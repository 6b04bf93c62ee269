"""Find whether a training step fits in given bytes, and the largest batch and sequence that fit, without allocating."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxprec import compat
from fxprec.config import Config
from fxprec.driver.backend import Backend
from fxprec.errors import BudgetError, ConfigError, either
from fxprec.passes.crossings.reserve import ALLOWANCE
from fxprec.passes.notice import readable
from fxprec.plan import PeakBytes, Plan
from fxprec.plan.rows import WholeStep
from fxprec.report.plan_taker import PlanTaker
from fxprec.report.target import Factory, plan_under_fakes
from fxprec.runtime.optim.all_optimizers import AllOptimizers
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
    whole: WholeStep | None = None
    """Bytes that stay in memory throughout the step; None if the step does not fit."""
    peak_budget: int = 0
    """Bytes to train with as ``peak_budget``; 0 with a step budget or a ``peak_budget`` that was given."""
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

    @property
    def peak(self) -> PeakBytes:
        """The plan's bytes beside those of `whole`; the step fits."""
        assert self.plan is not None
        assert self.plan.peak_bytes is not None, "each plan here has a peak budget"
        return self.plan.peak_bytes


@dataclass(frozen=True)
class TorchOptimizer:
    """An optimizer of torch.optim. It holds all gradients until its ``step()``, so a peak budget counts them."""

    name: str
    states: int
    """States of each parameter, in the parameter's dtype."""
    copies: int
    """Further tensors of each parameter's size that ``step()`` with ``foreach=True`` allocates."""


@dataclass(frozen=True)
class Question:
    """A model file's factory, the memory, and the options and optimizers of the step."""

    factory: Factory
    target: str
    budget: int
    optimizers: Callable[[torch.nn.Module], Sequence[Stepper]] | TorchOptimizer
    """Makes the optimizers of a model's trainable parameters, or describes one of torch.optim."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `Config`. With ``peak_budget`` the step is planned for that, and then compared with the memory."""

    def answer(self, batch: int | None = None, sequence: int | None = None) -> Answer:
        """Plan a step. ``batch`` and ``sequence`` replace the inputs' own first and second dimension.

        Raises `ConfigError` if the factory cannot make such inputs, or if no graph trains.
        """
        trial = _Trial(self, {"batch": batch, "sequence": sequence})
        try:
            plan_under_fakes(trial.make, trial.compile, self.target, trial.taker)
        except BudgetError as error:
            return trial.refused(*trial.said_of(error))
        if not trial.taker.plans:
            raise ConfigError(f"target {self.target!r}: no graph of it trains; let model(*inputs) run with gradients")
        return trial.planned(trial.taker.plans[0])


@dataclass(frozen=True)
class _Step:
    """A step of given sizes, and what of the memory it may hold."""

    backend: Backend
    optimizers: Sequence[Stepper]
    """Held here, since the backend refers to them weakly."""
    sizes: tuple[int, int]
    """Batch and sequence."""
    device: str
    reserved: int
    """Bytes left free for libraries."""
    room: int
    """Bytes of the memory that the step may hold."""
    trained: int
    """Bytes of the trainable parameters."""
    whole: WholeStep | None = None
    """Bytes that stay throughout the step, counted here where a peak budget is planned for; None with a step budget."""
    peak_budget: int = 0
    """Bytes to train with as ``peak_budget``; 0 if one was given, or with a step budget."""

    @classmethod
    def of(cls, asked: Question, model: torch.nn.Module, sizes: tuple[int, int], dump: PlanTaker) -> _Step:
        """Make the optimizers and the backend of a model. Raises `ConfigError` if nothing of it is trained."""
        options, reserved, kind = dict(asked.options), 0, asked.optimizers
        device = next((p.device.type for p in model.parameters()), "cpu")
        if device == "cpu":  # the CPU stands for a GPU: with one thread its kernels need the least workspace
            options["cpu"] = "avx512+bf16:1"
            reserved = FREE_BYTES + int(ALLOWANCE * asked.budget)
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(f"target {asked.target!r}: no parameter requires a gradient, so there is no step to plan")
        config, room = Config(lowering="eager", **options), max(asked.budget - reserved, 1)
        optimizers = () if isinstance(kind, TorchOptimizer) else tuple(kind(model))
        if optimizers and config.peak_budget is None:
            backend = Backend(config, dump=dump, optimizer=optimizers, step_budget=room)
            return cls(backend, optimizers, sizes, device, reserved, room, trained)
        every = AllOptimizers(optimizers)
        whole = WholeStep(
            budget=room,
            weights=compat.storage_bytes([*model.parameters(), *model.buffers()], (), device=None),
            states=kind.states * trained if isinstance(kind, TorchOptimizer) else every.state_bytes(),
            gradients=every.gradient_bytes(),
        )
        peak_budget = 0
        if config.peak_budget is None:
            peak_budget = max(room - whole.throughout, 1)
            config = replace(config, peak_budget=peak_budget)
        backend = Backend(config, dump=dump, optimizer=optimizers or None)
        return cls(backend, optimizers, sizes, device, reserved, room, trained, whole, peak_budget)


class _Trial:
    """One attempt to plan a step of given sizes."""

    step: _Step
    """Set by `make`."""

    def __init__(self, asked: Question, wanted: Mapping[str, int | None]) -> None:
        self.asked, self.taker = asked, PlanTaker()
        self.wanted = {name: size for name, size in wanted.items() if size is not None}

    def make(self) -> object:
        """Return what the factory makes: a model and its inputs, in the wanted sizes. Planning raises for all else."""
        made, sizes = _sized(self.asked.factory, self.asked.target, self.wanted)
        if sizes is not None:
            self.step = _Step.of(self.asked, made[0], sizes, self.taker)
        return made

    def compile(self, gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Plan a graph. Raises `BudgetError` for a part of a step, as a step budget does."""
        if self.step.whole is not None and compat.ends_in_break(gm):
            cut = "a graph break splits the step, and the plan of its first graph does not tell what the step holds"
            raise compat.through_dynamo(BudgetError(f"{cut}; let the model compile without graph breaks"))
        return self.step.backend(gm, examples)

    def planned(self, plan: Plan) -> Answer:
        """Return the answer of a plan: yes, or no where the step with the given peak budget holds too much."""
        found = replace(
            self._answer(), plan=plan, whole=self.step.whole or plan.whole_step, peak_budget=self.step.peak_budget
        )
        assert found.whole is not None
        total = found.whole.throughout + found.peak.planned
        if total <= self.step.room:
            return found
        held = (
            f"with peak_budget={self.asked.options['peak_budget']} the step holds {readable(found.peak.planned)} more"
        )
        return self.refused(f"{self._said_of(found.whole)}; {held}", total)

    def said_of(self, error: BudgetError) -> tuple[str, int]:
        """Return why no plan was found, and the bytes in which there is one, or 0 if unknown."""
        if self.step.whole is None or not error.enough:
            return str(error), error.enough
        held, enough = self._said_of(self.step.whole), self.step.whole.throughout + error.enough
        if not self.step.peak_budget:  # one was given
            return f"{held}; {error}", enough
        ours = (
            "take --optimizer adamw or sgd, of fxprec.optim, which step in backward and may hold states in fewer bits"
        )
        return f"{held}; in addition to these {error.found}; {either(ours, *error.ways)}", enough

    @staticmethod
    def _said_of(whole: WholeStep) -> str:
        return f"weights take {readable(whole.weights)}, optimizer states {readable(whole.states)}"

    def refused(self, why: str, enough: int) -> Answer:
        """Return the answer that the step does not fit, and would in ``enough`` bytes without reserves; 0: unknown."""
        free = f"{readable(self.step.reserved)} stay free for libraries; in the rest: " if self.step.reserved else ""
        return replace(self._answer(), why=free + why, enough=self._memory_for(enough))

    def _answer(self) -> Answer:
        size, length = self.step.sizes
        told = (*self.taker.told, *self._told_of_torch())
        return Answer(size, length, self.asked.budget, self.step.reserved, self.step.device, None, told=told)

    def _told_of_torch(self) -> Iterator[str]:
        kind = self.asked.optimizers
        if isinstance(kind, TorchOptimizer) and self.step.whole is not None:
            held = self.step.whole.throughout + (1 + kind.copies) * self.step.trained
            if kind.copies and held > self.step.room:
                yield (
                    f"step() of {kind.name} with foreach=True, its default on a GPU, holds {readable(held)} in all; "
                    "give it fused=True"
                )

    def _memory_for(self, enough: int) -> int:
        """Return the total bytes that leave ``enough`` bytes for the step; 0 for 0."""
        return math.ceil((enough + FREE_BYTES) / (1 - ALLOWANCE)) if enough and self.step.reserved else enough


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


def _sized(factory: Factory, target: str, wanted: Mapping[str, int]) -> tuple[Any, tuple[int, int] | None]:
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
