"""Predict other low ratios from the plan alone: low elements, bytes saved for backward, rounding error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fxprec.config.recipes import Recipe
from fxprec.numerics.formats import Format
from fxprec.plan import Group, Plan

RATIOS = tuple(i / 10 for i in range(1, 11))
# Mean of 1/x**2 over [1, 2) for log-uniform x; with it, a uniform error of variance ulp**2 / 12 becomes relative.
_MEAN_INVERSE_SQUARE = 3 / (8 * math.log(2))


@dataclass(frozen=True, slots=True)
class Point:
    """The result of demoting the first groups of the order."""

    groups: int
    """Number of groups that are low."""
    reached: float
    """Share of all elements that are low."""
    saved_bytes: int | None
    """Bytes saved for backward; None if the plan does not record them."""
    error: float
    """Relative rounding error of a stored element, root mean square over all elements (`rounding_error`)."""
    damage: float | None
    """Measured increase of the loss, to first order; None if nothing was measured."""


def by_group(plan: Plan, damage: Sequence[float] | None = None) -> list[Point]:
    """Return a point for no group low, then one for each group demoted in the policy's order."""
    high = [_squares(plan.recipe, group, low=False) for group in plan.groups]
    squares, elements, low_elements = math.fsum(high), max(plan.total_elements, 1), 0
    saved = _saved(plan, low=False)
    total = None if any(size is None for size in saved) else sum(filter(None, saved))
    lost = 0.0
    points = [Point(0, 0.0, total, _root(squares, elements), None if damage is None else 0.0)]
    gains = _saved(plan, low=True)
    for group in sorted(plan.groups, key=lambda g: g.order):
        low_elements += group.elements
        squares += _squares(plan.recipe, group, low=True) - high[group.id]
        after, before = gains[group.id], saved[group.id]
        if total is not None and after is not None and before is not None:
            total += after - before
        lost += 0.0 if damage is None else damage[group.id]
        error = _root(max(squares, 0.0), elements)
        measured = None if damage is None else lost
        points.append(Point(len(points), low_elements / elements, total, error, measured))
    return points


def by_ratio(points: Sequence[Point]) -> list[Point]:
    """Return the first point that reaches each ratio 0.1, 0.2, ... 1; the last point if none does."""
    return [next((p for p in points if p.reached >= ratio - 1e-12), points[-1]) for ratio in RATIOS]


def rounding_error(fmt: Format) -> float:
    """Return the relative error of rounding to nearest, root mean square over log-uniform values in range.

    Overflow and underflow are not included: they depend on the values, which a plan does not know.
    """
    return math.sqrt(_MEAN_INVERSE_SQUARE / 12) * 2.0**-fmt.mantissa_bits


def _squares(recipe: Recipe, group: Group, *, low: bool) -> float:
    counts = asdict(group.elements_by_kind).items()
    return math.fsum(n * rounding_error(recipe.format_of(kind, low=low)) ** 2 for kind, n in counts)


def _saved(plan: Plan, *, low: bool) -> list[int | None]:
    fmt = plan.recipe.format_of("output", low=low)
    size = 1 if fmt.bits <= 8 else 2 if fmt.bits <= 16 else 4
    return [None if g.saved_elements is None else g.saved_elements * size for g in plan.groups]


def _root(squares: float, elements: int) -> float:
    return math.sqrt(squares / elements)
