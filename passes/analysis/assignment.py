"""Choose the low tensors: run a policy, check its choice against the goal, and report the share that it reaches.

Definitions: docs/algorithms.md, "Demotion and promotion".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from fxprec.config import Settings, policy_name
from fxprec.config.recipes import Recipe
from fxprec.errors import BudgetError
from fxprec.passes.analysis.policies import POLICIES, Problem, from_function
from fxprec.passes.analysis.saved_bytes import SavedBytes, bytes_in_float32
from fxprec.passes.analysis.selection import kept_high
from fxprec.passes.analysis.tensors import CountedTensor
from fxprec.passes.notice import readable
from fxprec.plan import ByteCount


@dataclass(frozen=True, slots=True)
class Assignment:
    """The low tensors, the order in which groups were demoted, and the share or bytes that this reaches."""

    low: frozenset[int]
    """Ids of the low counted tensors. A low group's parameter gradients are among them, but keep their format."""
    low_groups: frozenset[int]
    """Groups whose tensors are all low, except those that ``keep_high`` keeps high."""
    order: Mapping[int, int]
    """Position of every group in the policy's order of demotion."""
    achieved_ratio: float
    """Elements of low tensors / all elements."""
    bit_ratio: float
    """2 x (bits at all-high - bits) / bits at all-high."""
    gap: float | None
    """Proved relative distance from the optimum (policy ``exact``)."""
    policy: str
    saved: ByteCount
    """Predicted bytes saved for backward."""
    warnings: tuple[str, ...] = ()
    """One text for each goal that the user set and the assignment does not reach."""


def assign(
    tensors: Sequence[CountedTensor],
    settings: Settings,
    *,
    damage: Mapping[int, float] | None = None,
    saved_bytes: SavedBytes | None = None,
    may_exceed: bool = False,
    ends: frozenset[int] | None = None,
) -> Assignment:
    """Choose the low tensors of one graph.

    ``damage`` predicts the loss that a low tensor causes, by tensor id (absent: none); policy ``"exact"`` needs it.
    ``saved_bytes`` has each tensor's bytes while saved for backward; if None, they are predicted from the tensors
    marked ``saved``. With ``may_exceed`` the caller checks the budget. ``ends`` are the tensors of ``keep_high="ends"``
    if the groups do not determine them (`kept_high`).

    Raises `BudgetError` for a budget out of reach. Raises `ConfigError` for ``"exact"`` without damages, and if a
    policy function returns anything but a set of groups.
    """
    recipe = settings.recipe
    saved_bytes = saved_bytes or SavedBytes.predict(tensors, recipe)
    pinned, warnings = kept_high(tensors, settings.asked.keep_high, ends)
    problem = _problem(tensors, settings, pinned, damage, saved_bytes)
    policy = (
        from_function(settings.asked.policy) if callable(settings.asked.policy) else POLICIES[settings.asked.policy]
    )
    choice = policy(problem)
    low = choice.low - pinned if problem.may_demote else frozenset()
    planned = saved_bytes.total(low)
    if not may_exceed and settings.activation_budget is not None and planned > settings.activation_budget:
        raise over_budget(settings, min(planned, saved_bytes.total(frozenset())))
    return Assignment(
        low=low,
        low_groups=_low_groups(problem, low),
        order={group: position for position, group in enumerate(choice.order)},
        achieved_ratio=_ratio(sum(t.elements for t in tensors if t.id in low), sum(t.elements for t in tensors)),
        bit_ratio=_bit_ratio(tensors, recipe, low),
        gap=choice.gap,
        policy=policy_name(settings.asked.policy),
        saved=ByteCount(fp32=bytes_in_float32(tensors) + saved_bytes.fixed, planned=planned),
        warnings=(*warnings, *_shortfall(problem, low)),
    )


def elements_needed(ratio: float, total: int) -> int:
    """Return the smallest number of elements that is a share of at least ``ratio`` of ``total``.

    Exact except for the last bits of ``ratio``: ``3 * 0.1``, slightly above 0.3, requires 3 elements in 10, not 4.
    """
    share = Fraction(ratio) * (1 - Fraction(1, 2**50)) if ratio < 1 else Fraction(1)
    return math.ceil(share * total)


def _problem(
    tensors: Sequence[CountedTensor],
    settings: Settings,
    pinned: frozenset[int],
    damage: Mapping[int, float] | None,
    saved_bytes: SavedBytes,
) -> Problem:
    groups: dict[int, list[CountedTensor]] = {g: [] for g in range(max((t.group for t in tensors), default=-1) + 1)}
    for tensor in tensors:
        if tensor.id not in pinned:
            groups[tensor.group].append(tensor)
    if settings.activation_budget is None:
        need = elements_needed(settings.low_ratio or 0.0, sum(t.elements for t in tensors))
        gain = {g: sum(t.elements for t in members) for g, members in groups.items()}
    else:
        need = saved_bytes.total(frozenset()) - settings.activation_budget
        gain = {g: sum(saved_bytes.gain(t.id) for t in members) for g, members in groups.items()}
    damages = None
    if damage is not None:
        damages = {g: [damage.get(t.id, 0.0) for t in members] for g, members in groups.items()}
    return Problem(
        tensors=tensors,
        settings=settings,
        groups=groups,
        gain=gain,
        need=need,
        damage=damages,
        may_demote=settings.recipe.has_low and settings.low_ratio != 0,
    )


def over_budget(settings: Settings, least: int) -> BudgetError:
    """Return the error for a budget below ``least``, the bytes that have to be saved."""
    name = policy_name(settings.asked.policy)
    ways = ["raise the budget to that", "take a smaller batch"]
    if not settings.recipe.has_low:
        ways.append(f"choose a recipe with a low format ({settings.recipe.name!r} has none)")
    if settings.asked.keep_high:
        ways.append("keep less high")
    if name in ("uniform", "operator", "operator-io") or callable(settings.asked.policy):
        ways.append("choose policy 'size'")
    return BudgetError(
        f"activation_budget is {readable(settings.activation_budget or 0)}, but with recipe {settings.recipe.name!r} "
        f"and policy {name!r} what is saved for backward takes at least {readable(least)}; {', '.join(ways[:-1])} or "
        f"{ways[-1]}"
    )


def _shortfall(problem: Problem, low: frozenset[int]) -> list[str]:
    """Return a warning if the ratio that the user set was not reached, with the reason."""
    settings, asked = problem.settings, problem.settings.asked
    total = sum(t.elements for t in problem.tensors)
    reached = sum(t.elements for t in problem.tensors if t.id in low)
    if not asked.low_ratio or reached >= elements_needed(asked.low_ratio, total):
        return []
    if not settings.recipe.has_low:
        why = f"recipe {settings.recipe.name!r} has no low format; choose 'fp8', or leave low_ratio out"
    elif problem.demotable >= elements_needed(asked.low_ratio, total):
        why = f"policy {policy_name(settings.asked.policy)!r} decides by itself; choose 'size', or leave low_ratio out"
    else:
        why = f"keep_high holds {total - problem.demotable} of {total} elements; keep less high, or ask for less"
    return [f"low_ratio {asked.low_ratio:g} is not reached ({_ratio(reached, total):.4g}): {why}"]


def _low_groups(problem: Problem, low: frozenset[int]) -> frozenset[int]:
    def is_low(members: Iterable[CountedTensor]) -> bool:
        chosen = [t.id in low for t in members if t.kind != "grad_param"]
        return bool(chosen) and all(chosen)

    return frozenset(g for g, members in problem.groups.items() if is_low(members))


def _bit_ratio(tensors: Sequence[CountedTensor], recipe: Recipe, low: frozenset[int]) -> float:
    high_bits = sum(t.elements * recipe.format_of(t.kind, low=False).bits for t in tensors)
    bits = sum(t.elements * recipe.format_of(t.kind, low=t.id in low).bits for t in tensors)
    return _ratio(2 * (high_bits - bits), high_bits)


def _ratio(part: int, whole: int) -> float:
    return float(Fraction(part, whole)) if whole else 0.0
