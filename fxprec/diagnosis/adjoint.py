"""How much each element of each stored copy matters: backward, differentiated once more.

Let ``J`` be the derivative of the weighted gradients by a stored copy. An error ``e`` of the copy changes the gradients
by ``J e``. Probes ``r`` of random signs give ``v = J^T r`` for all copies at once; the mean of ``v^2`` is each
element's share of ``|J|^2`` (Hutchinson 1990). Rounding errors are nearly independent, so ``|J e|^2`` is the sum of
``e^2 v^2``. If they are dependent, for instance where everything saturates, ``(v . e)^2`` is larger and is used.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxprec.diagnosis.lab import Cast, Lab
from fxprec.diagnosis.weights import Gradients, floating

PROBES = 6
# Ratio, squared, of the estimate for dependent errors to that for independent ones. With six probes of independent
# errors one in 3,000 is larger by chance (chi-squared of 6 degrees of freedom, over 6).
DEPENDENT = 4.0


@dataclass(frozen=True)
class Sensitivity:
    """The derivatives of backward's gradients by one stored copy. Each vector has the copy's shape."""

    probes: tuple[Tensor, ...]
    """``J^T r`` of each probe; empty if no gradient depends on the copy."""
    progress: Tensor | None
    """Derivative of the gradients' product with the exact gradients, over the exact gradients' squared norm."""

    def damage(self, error: Tensor) -> float:
        """Return the predicted damage of an error of the copy, to first order."""
        if not self.probes:
            return 0.0
        if not bool(error.isfinite().all()):
            return math.inf
        products = [(v * error).double() for v in self.probes]
        independent = sum(float(p.square().sum()) for p in products) / len(products)
        dependent = sum(float(p.sum()) ** 2 for p in products) / len(products)
        return math.sqrt(dependent if dependent > DEPENDENT * independent else independent)

    def change(self, error: Tensor) -> float:
        """Return the predicted change of the loss that a gradient step removes, as `Gradients.progress`."""
        if self.progress is None:
            return 0.0
        found = float((self.progress * error).double().sum())
        return found if math.isfinite(found) else -math.inf


def sensitivities(lab: Lab, gradients: Gradients, names: Container[str]) -> dict[str, Sensitivity]:
    """Return the sensitivity of each cast of these names. It takes 4 * (`PROBES` + 1) bytes per element."""
    leaves: dict[str, Tensor] = {}

    def with_error(cast: Cast, x: Tensor) -> Tensor:
        if cast.name not in names:
            return x
        error = torch.zeros_like(x, requires_grad=True)
        leaves[cast.name] = error
        return x + error

    outputs = floating(lab.run(with_error, differentiate=True))
    reached = [i for i, g in enumerate(outputs) if g.requires_grad]
    copies = list(leaves.values())
    if not reached:
        return {name: Sensitivity((), None) for name in leaves}
    chosen = [outputs[i] for i in reached]

    def back(vectors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return torch.autograd.grad(chosen, copies, vectors, retain_graph=True, allow_unused=True)

    generator = torch.Generator().manual_seed(0)
    found = [back([_signs(outputs[i], generator) * gradients.weights[i] for i in reached]) for _ in range(PROBES)]
    squares = gradients.squares or 1.0
    progress = back([gradients.exact[i].to(outputs[i]) / squares for i in reached])
    return {name: _sensitivity([f[i] for f in found], progress[i]) for i, name in enumerate(leaves)}


def _sensitivity(probes: Sequence[Tensor | None], progress: Tensor | None) -> Sensitivity:
    return Sensitivity(
        tuple(p.float() for p in probes if p is not None), None if progress is None else progress.float()
    )


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8, device="cpu")
    return (signs * 2 - 1).to(like)


def combined(damages: Iterable[float]) -> float:
    """Return the damage of several copies together, whose errors are independent of each other."""
    return math.sqrt(math.fsum(d * d for d in damages))
