"""Policies: small functions from a `Problem` to a `Choice` (Lee et al. 2023, section 5.2).

Definitions: docs/algorithms.md, "Demotion and promotion".
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType

from fxprec.config import Policy as PolicyFunction
from fxprec.config import Settings, policy_name
from fxprec.errors import ConfigError
from fxprec.passes.analysis.knapsack import min_damage_cover
from fxprec.passes.analysis.tensors import CountedTensor


@dataclass(frozen=True, slots=True)
class Problem:
    """The input of a policy: tensors, settings, and the tensors of each group that may become low."""

    tensors: Sequence[CountedTensor]
    settings: Settings
    groups: Mapping[int, Sequence[CountedTensor]]
    gain: Mapping[int, int]
    """The gain from demoting each group: elements, or bytes no longer saved."""
    need: int
    """The gain that the goal requires."""
    damage: Mapping[int, Sequence[float]] | None
    """Predicted loss caused by each low tensor of a group, or None if nothing was measured."""
    may_demote: bool
    """False if the recipe has no low format, or the requested ratio is 0."""

    def elements(self, group: int) -> int:
        """Return the number of elements of a group's tensors."""
        return sum(t.elements for t in self.groups[group])

    @property
    def demotable(self) -> int:
        """Return the number of elements that may become low."""
        return sum(map(self.elements, self.groups))


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of a policy: the ids of low tensors, and every group in order of demotion."""

    low: frozenset[int]
    order: Sequence[int]
    gap: float | None = None


Policy = Callable[[Problem], Choice]


def _tensors_of(problem: Problem, groups: Iterable[int]) -> frozenset[int]:
    return frozenset(t.id for g in groups for t in problem.groups[g])


def _demote(order: Callable[[Problem], Sequence[int]]) -> Policy:
    """Return a policy that demotes whole groups in ``order`` until the goal is met."""

    def policy(problem: Problem) -> Choice:
        ordered = order(problem)
        reached, demoted = 0, []
        for group in ordered:
            if reached >= problem.need:
                break
            demoted.append(group)
            reached += problem.gain[group]
        return Choice(_tensors_of(problem, demoted), ordered)

    return policy


def _largest_first(problem: Problem) -> list[int]:
    return sorted(problem.groups, key=lambda g: (-problem.elements(g), g))


def _smallest_first(problem: Problem) -> list[int]:
    return sorted(problem.groups, key=lambda g: (problem.elements(g), g))


def _shuffled(problem: Problem) -> list[int]:
    order = sorted(problem.groups)
    random.Random(problem.settings.asked.seed).shuffle(order)
    return order


def _everything(problem: Problem) -> Choice:
    return Choice(_tensors_of(problem, problem.groups), sorted(problem.groups))


def _by_operator(is_low: Callable[[CountedTensor], bool]) -> Policy:
    """Return a policy that chooses single tensors by their role beside a GEMM."""

    def policy(problem: Problem) -> Choice:
        return Choice(frozenset(t.id for t in problem.tensors if is_low(t)), sorted(problem.groups))

    return policy


def _enters_gemm(tensor: CountedTensor) -> bool:
    if tensor.kind == "param":
        return tensor.of_gemm
    return tensor.kind != "grad_param" and tensor.feeds_gemm


def _touches_gemm(tensor: CountedTensor) -> bool:
    return _enters_gemm(tensor) or (tensor.kind != "grad_param" and tensor.of_gemm)


def _least_damage(problem: Problem) -> Choice:
    if not problem.may_demote or problem.need <= 0:
        return Choice(frozenset(), _largest_first(problem), 0.0)
    if problem.damage is None:
        raise ConfigError(
            "policy 'exact' needs the damage of each tensor, and none was measured; pass damage= (one calibration "
            "batch measures it), or choose policy 'size'"
        )
    groups = sorted(problem.groups)
    damages = [math.fsum(problem.damage[g]) for g in groups]
    cover = min_damage_cover([problem.gain[g] for g in groups], damages, problem.need)
    if cover is None:  # out of reach: demote every group, as the other policies do
        return Choice(_tensors_of(problem, groups), _largest_first(problem))
    chosen = {groups[i] for i in cover.chosen}
    order = sorted(groups, key=lambda g: (g not in chosen, -problem.elements(g), g))
    return Choice(_tensors_of(problem, chosen), order, cover.gap)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "size": _demote(_largest_first),
        "size-ascending": _demote(_smallest_first),
        "random": _demote(_shuffled),
        "uniform": _everything,
        "operator": _by_operator(_enters_gemm),
        "operator-io": _by_operator(_touches_gemm),
        "exact": _least_damage,
    }
)


def from_function(function: PolicyFunction) -> Policy:
    """Return the policy of a user's ``f(tensors, config) -> group ids``. It raises `ConfigError` for other results."""

    def policy(problem: Problem) -> Choice:
        chosen = _group_ids(function, problem)
        rest = [g for g in sorted(problem.groups) if g not in chosen]
        return Choice(_tensors_of(problem, chosen), [*chosen, *rest])

    return policy


def _group_ids(function: PolicyFunction, problem: Problem) -> list[int]:
    name = policy_name(function)
    try:
        returned: object = function(tuple(problem.tensors), problem.settings.asked)
    except Exception as error:  # raised by the user's function; chained below
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"policy {name} raised {cause}; it is called as f(tensors, config)") from error
    wanted = f"a collection of group ids, 0 to {len(problem.groups) - 1}"
    if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
        raise ConfigError(f"policy {name} returned {returned!r}; let it return {wanted}")
    chosen = list(returned)
    for group in chosen:
        if isinstance(group, bool) or not isinstance(group, Integral) or int(group) not in problem.groups:
            raise ConfigError(f"policy {name} returned {group!r}, which is not a group; let it return {wanted}")
    return list(dict.fromkeys(int(group) for group in chosen))
