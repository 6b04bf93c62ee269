"""Measure a change of the gradients as one number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

# Shares of the median gradient's root mean square, and of the largest in the same module. Below them a gradient counts
# as zero, like that of a bias before a norm in theory: an error relative to such a gradient would mean nothing.
FLOOR = 0.01
FLOOR_IN_MODULE = 0.1


@dataclass(frozen=True)
class Gradients:
    """The exact gradients of a step, and how much an error in each counts.

    The *damage* of an error is the root mean square, over the gradients, of each gradient's relative L2 error. An
    optimizer that scales each parameter's gradient (Adam) takes a step that is off by as much.
    """

    exact: tuple[Tensor, ...]
    weights: tuple[float, ...]
    """Weight of each gradient's error: 1 / (its L2 norm, not below the floor), over the root of their number."""

    @classmethod
    def of(cls, returned: Sequence[object], modules: Sequence[str]) -> Gradients:
        """Weigh backward's results; ``modules`` are the modules of the inputs whose gradients they are."""
        owners = [m for g, m in zip(returned, modules, strict=False) if _is_floating(g)]
        found = floating(returned)
        norms = [float(g.double().norm()) for g in found]
        roots = [math.sqrt(max(g.numel(), 1)) for g in found]
        rms = [norm / root for norm, root in zip(norms, roots, strict=True)]
        floors = _floors(rms, owners if len(owners) == len(found) else [""] * len(found))
        share = math.sqrt(max(len(found), 1))
        sizes = [max(norm, floor * root) * share for norm, floor, root in zip(norms, floors, roots, strict=True)]
        return cls(tuple(found), tuple(1 / size if size else 0.0 for size in sizes))

    @property
    def is_finite(self) -> bool:
        """Return whether all exact gradients are finite."""
        return all(bool(g.isfinite().all()) for g in self.exact)

    @property
    def squares(self) -> float:
        """The squared L2 norm of all gradients."""
        return sum(float(g.double().square().sum()) for g in self.exact)

    def damage(self, returned: Sequence[object]) -> float:
        """Return the damage of other gradients of the same step; inf if one is not finite."""
        total = 0.0
        for g, e, w in zip(floating(returned), self.exact, self.weights, strict=True):
            total += (w * float((g.double() - e.double()).norm())) ** 2
        return math.sqrt(total) if math.isfinite(total) else math.inf

    def progress(self, returned: Sequence[object]) -> float:
        """Return the change of the loss that a gradient step removes, relative to the exact gradient's step."""
        found = sum(float((g.double() * e.double()).sum()) for g, e in zip(floating(returned), self.exact, strict=True))
        change = found / self.squares - 1 if self.squares else 0.0
        return change if math.isfinite(change) else -math.inf


def _floors(rms: Sequence[float], owners: Sequence[str]) -> list[float]:
    if not rms:
        return []
    median = sorted(rms)[len(rms) // 2]
    largest: dict[str, float] = {}
    for value, owner in zip(rms, owners, strict=True):
        largest[owner] = max(largest.get(owner, 0.0), value)
    return [max(FLOOR * median, FLOOR_IN_MODULE * largest[owner] if owner else 0.0) for owner in owners]


def floating(returned: Sequence[object]) -> list[Tensor]:
    """Return the gradients among backward's results."""
    return [g for g in returned if _is_floating(g)]


def _is_floating(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
