"""`Settings`: the values in force, resolved once from the names and defaults of a `Config`."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Self

from fxprec.config.accumulator import Accumulator, find_accumulator
from fxprec.config.config import Config, Storage
from fxprec.config.contradictions import storage_in_force
from fxprec.config.grad_scaling import NAMED, Scaling
from fxprec.config.processor import Processor
from fxprec.config.recipes import Recipe, find_recipe
from fxprec.config.ways import DEFAULT_WAYS
from fxprec.numerics.formats import Format


@dataclass(frozen=True)
class PeakBudget:
    """A peak budget in bytes, or as a share of the step's peak with everything kept in high precision."""

    asked: int | str
    has_libraries: bool = True
    """Whether a number of bytes includes what libraries need on a GPU, which a share never does."""

    @property
    def is_share(self) -> bool:
        """Whether the budget is a share of a step's peak instead of a number of bytes."""
        return not isinstance(self.asked, int)

    def bytes_of(self, high: int) -> int:
        """Return the budget in bytes. ``high``: the step's peak with everything kept in high precision, in bytes."""
        return self.asked if isinstance(self.asked, int) else int(high * Fraction(self.asked.rstrip("%")) / 100)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The resolved options that the passes, the driver and the runtime use."""

    asked: Config
    recipe: Recipe
    storage: Storage
    low_ratio: float | None
    """The given ratio or the default; None under an activation budget or a plan, which replace the ratio."""
    activation_budget: int | None
    """Bytes."""
    peak_budget: PeakBudget | None
    ways: tuple[str, ...]
    """The ways to keep a value that may be used to meet a peak budget."""
    wants_compact_allocator: bool
    """Whether CPU tensors should be in the compact allocator, if it can be installed."""
    grad_scaling: Scaling | None
    accumulator: Accumulator | None
    processor: Processor
    """The processor that a model on a CPU is planned for: the requested one, or this machine's."""

    @classmethod
    def of(cls, asked: Config) -> Self:
        """Resolve the names and defaults of a config."""
        recipe, accumulator = find_recipe(asked.recipe), find_accumulator(asked.accumulator)
        budget, scaling = asked.activation_budget, asked.grad_scaling
        assert not isinstance(budget, str), "stored in canonical form"
        storage = storage_in_force(asked, recipe)
        return cls(
            asked=asked,
            recipe=recipe,
            storage=storage,
            low_ratio=_low_ratio(asked, recipe, storage),
            activation_budget=budget,
            peak_budget=None if asked.peak_budget is None else PeakBudget(asked.peak_budget),
            ways=asked.ways or DEFAULT_WAYS,
            wants_compact_allocator=asked.allocator == "compact"
            or (asked.allocator is None and asked.peak_budget is not None),
            grad_scaling=scaling if isinstance(scaling, Scaling) else NAMED[scaling],
            accumulator=accumulator,
            processor=Processor.here() if asked.cpu is None else Processor.parse(asked.cpu),
        )

    @property
    def counts_while_rounding(self) -> bool:
        """Whether kernels count each copy's losses, since codes may give inf and the largest number alike."""
        return self.asked.on_nonfinite in ("report", "raise")

    @property
    def is_simulated(self) -> bool:
        """Whether values are stored in float32, rounded to the numbers of their formats."""
        return self.storage == "simulate"

    @property
    def rounds_anything(self) -> bool:
        """Whether any tensor can be rounded to another format than float32."""
        rounds_in_gemms = self.accumulator is not None or self.recipe.operands is not None
        return rounds_in_gemms or any(fmt.name != "fp32" for fmt in self._formats_used())

    def _formats_used(self) -> tuple[Format, ...]:
        recipe = self.recipe
        return recipe.formats if recipe.has_low and self.low_ratio != 0 else (recipe.hi, recipe.weight_grad)


# In simulation every reader gets the rounded value, so accuracy falls as the ratio grows: use the middle of the paper's
# range (Lee et al. 2023, section 5.3). In real storage operators read unrounded values, so accuracy does not fall
# (docs/policies.md): make all stored tensors low.
SIMULATED_LOW_RATIO, STORED_LOW_RATIO = 0.5, 1.0


def _low_ratio(asked: Config, recipe: Recipe, storage: Storage) -> float | None:
    if asked.low_ratio is not None or asked.activation_budget is not None or asked.plan is not None:
        return asked.low_ratio
    if not recipe.has_low:
        return 0.0
    return SIMULATED_LOW_RATIO if storage == "simulate" else STORED_LOW_RATIO
