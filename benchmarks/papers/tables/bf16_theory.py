"""Zamirai et al. 2020, Figure 2 and Theorems 1 and 2: least squares, sixteen problems side by side.

10 dimensions, x ~ N(0, 1), w* ~ U[0, 100), batch size 1, learning rate 0.01. Labels are noisy (0.5) for the curves and
exact for the theorems, whose assumption A1 is a perfect fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fxprec
from benchmarks.papers import svg
from benchmarks.papers.claims import Claim, Verdict, exactly
from benchmarks.papers.found import Found, Row
from benchmarks.papers.sixteen_bit import rounded
from fxprec.numerics.formats import BF16

TITLE = "Least squares: which rounding stops the weights"
SOURCE = "Figure 2, Theorems 1 and 2"
PUBLISHED: dict[str, dict[str, float]] = {}
SMALLER = ""
DEVIATES = (
    "Sixteen problems of 500 samples take the place of one. For Theorem 1 the optimum is rounded to bf16, "
    "because otherwise no bf16 weights lie inside its radius at all. The figure prints no numbers; it shows the "
    "curves. Theorem 2's expectation is the mean of 256 orders of samples of one problem, with weights in "
    "float64."
)
SEEDS = 1
DIM, SAMPLES, PROBLEMS, ORDERS, LR = 10, 500, 16, 256, 0.01
EPSILON = 2.0**-8  # machine epsilon of bf16 in the paper's sense: half the largest relative gap
EVERY = 25
EXACT, COMPUTE, UPDATES = "no rounding", "forward and backward rounded", "weight updates rounded"
ONE, TWO = "Theorem 1", "Theorem 2"


@dataclass(frozen=True)
class Problems:
    """Inputs (problems, samples, 10), labels (problems, samples), optima (problems, 10)."""

    x: Tensor
    y: Tensor
    best: Tensor

    @property
    def lipschitz(self) -> Tensor:
        """L of assumption A2, by problem."""
        return self.x.square().sum(2).amax(1)

    def loss(self, weight: Tensor) -> float:
        """Mean over problems."""
        return float((torch.einsum("psd,pd->ps", self.x, weight) - self.y).square().mean() / 2)


def problems(noise: float) -> Problems:
    """The same inputs for any noise; the optimum is one that bf16 has."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(PROBLEMS, SAMPLES, DIM, generator=g)
    best = rounded(100 * torch.rand(PROBLEMS, DIM, generator=g), BF16)
    y = torch.einsum("psd,pd->ps", x, best)
    return Problems(x, y + noise * torch.randn(y.shape, generator=g), best)


def run(seed: int, full: bool) -> Iterator[Row]:
    """Three curves, then the theorems."""
    steps = 12_000 if full else 3_000
    for kind in (EXACT, COMPUTE, UPDATES):
        yield kind, train(kind, problems(0.5), steps)
    yield ONE, theorem_one(steps)
    yield TWO, theorem_two(steps)


def train(kind: str, given: Problems, steps: int) -> dict[str, Any]:
    """SGD on all problems at once; one sample of each a step."""
    g = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.zeros(PROBLEMS, DIM))
    fmt = "bf16" if kind == UPDATES else "fp32"
    optimizer = fxprec.optim.SGD([weight], lr=LR, update="nearest", format=fmt, count_cancelled=True)
    curve, closest, every = [], torch.full((PROBLEMS,), torch.inf), torch.arange(PROBLEMS)
    for t in range(steps):
        chosen = torch.randint(SAMPLES, (PROBLEMS,), generator=g)
        x, y = given.x[every, chosen], given.y[every, chosen]
        fmt = BF16 if kind == COMPUTE else None
        error = rounded((x * weight.detach()).sum(1) - y, fmt)
        weight.grad = rounded(error[:, None] * x, fmt)
        if t == steps - steps // 10:
            optimizer.cancelled(reset=True)
        optimizer.step()
        if t % EVERY == 0:
            curve.append(given.loss(weight.detach()))
        closest = torch.minimum(closest, (weight.detach() - given.best).norm(dim=1))
    (counted,) = optimizer.cancelled()
    last = sum(curve[-20:]) / 20
    return {
        "loss": last,
        "updates cancelled at the end, %": 100 * counted.share,
        "closest": closest.tolist(),
        "curve": curve,
    }


def theorem_one(steps: int) -> dict[str, Any]:
    """Starts inside the radius must not move; runs from outside must stay beyond the lower bound."""
    given = problems(0.0)
    smallest, lipschitz = given.best.abs().amin(1), given.lipschitz
    radius = EPSILON / (LR * lipschitz + EPSILON) * smallest
    bound = EPSILON * (1 - LR * lipschitz) / (LR * lipschitz + EPSILON) * smallest
    inside, moved = starts_inside(given, radius)
    closest = torch.tensor(train(UPDATES, given, steps)["closest"])
    return {"starts inside": inside, "moved": moved, "runs below the lower bound": int((closest < bound).sum()),
            "radius": float(radius.mean()), "lower bound": float(bound.mean()), "closest": closest.tolist(),
            "closest distance": float(closest.mean())}  # fmt: skip


def starts_inside(given: Problems, radius: Tensor) -> tuple[int, int]:
    """bf16 weights within the radius, each stepped with a sample: how many, and how many of them move."""
    g = torch.Generator().manual_seed(2)
    unit = torch.ldexp(torch.ones(PROBLEMS, DIM), torch.frexp(given.best).exponent - 8)
    inside = moved = 0
    for _ in range(200):
        offset = torch.randint(-2, 3, (PROBLEMS, DIM), generator=g) * (torch.rand(PROBLEMS, DIM, generator=g) < 0.3)
        start = rounded(given.best + offset * unit * (unit < radius[:, None]), BF16)
        chosen = torch.randint(SAMPLES, (PROBLEMS,), generator=g)
        x = given.x[torch.arange(PROBLEMS), chosen]
        weight = torch.nn.Parameter(start.clone())
        weight.grad = (x * (start - given.best)).sum(1, keepdim=True) * x
        fxprec.optim.SGD([weight], lr=LR, update="nearest", format="bf16").step()
        distance = (start - given.best).norm(dim=1)
        is_inside = (distance > 0) & (distance <= radius)
        inside += int(is_inside.sum())
        moved += int((is_inside & (weight.detach() != start).any(1)).sum())
    return inside, moved


def theorem_two(steps: int) -> dict[str, Any]:
    """The mean squared distance over many orders, against the bound at every recorded step."""
    given, g = problems(0.0), torch.Generator().manual_seed(3)
    x, best = given.x[0].double(), given.best[0].double()
    y, weight = x @ best, torch.zeros(ORDERS, DIM, dtype=torch.float64)
    smallest = float(torch.linalg.eigvalsh(x.T @ x / SAMPLES)[0])
    rate = LR * smallest * (1 - 4 * EPSILON * float(given.lipschitz[0]) / smallest)
    curve, bound = [], []
    for t in range(steps):
        if t % EVERY == 0:
            curve.append(float((weight - best).square().sum(1).mean()))
            bound.append(float(best.square().sum() * torch.exp(torch.tensor(-rate * t))))
        row = torch.randint(SAMPLES, (ORDERS,), generator=g)
        error = rounded(((x[row] * weight).sum(1) - y[row]).float(), BF16)
        grad = rounded(error[:, None] * x[row].float(), BF16)
        weight = weight - LR * grad.double()
    above = sum(c > b for c, b in zip(curve, bound, strict=True))
    return {"squared distance at the end": curve[-1], "bound at the end": bound[-1], "recorded steps above the bound": above,
            "curve": curve, "bound": bound}  # fmt: skip


def _saturates(found: Found) -> Verdict:
    exact, compute, updates = (found.mean(kind, "loss") for kind in (EXACT, COMPUTE, UPDATES))
    return exactly(
        updates > 5 * exact and compute < 1.2 * exact, f"{updates:.3g} against {compute:.4g} and {exact:.4g}"
    )


def _first(found: Found) -> Verdict:
    inside, moved, below = (found.mean(ONE, c) for c in ("starts inside", "moved", "runs below the lower bound"))
    detail = f"{moved:.0f} of {inside:,.0f} starts move, {below:.0f} of {PROBLEMS} runs come closer than the bound"
    return exactly(inside > 100 and moved == 0 and below == 0, detail)


def _second(found: Found) -> Verdict:
    above, reached = found.mean(TWO, "recorded steps above the bound"), found.mean(TWO, "squared distance at the end")
    return exactly(above == 0, f"{above:.0f} steps above it; at the end {reached:.1e}")


CLAIMS = [
    Claim(
        "rounding weight updates stops the loss far above 32 bits; rounding forward and backward hardly moves it",
        _saturates,
    ),
    Claim("Theorem 1: inside its radius every update is cancelled, and no run comes closer than its bound", _first),
    Claim("Theorem 2: with exact updates the squared distance stays below a bound that goes to 0", _second),
]


def draw(found: Found) -> str:
    """The three curves of Figure 2."""
    lines = {kind: found.curve(kind, "curve") for kind in (EXACT, COMPUTE, UPDATES)}
    xs = [EVERY * i for i in range(len(lines[EXACT]))]
    return svg.curves(lines, "steps", "training loss", xs=xs, is_log=True)
