"""Zamirai et al. 2020, section 3: least squares in bf16, three curves, and the radius of Theorem 1.

    python -m benchmarks.optim.least_squares

10 dimensions, x ~ N(0, 1), w* ~ U[0, 100), SGD with batch size 1 and learning rate 0.01. Label noise 0.5 for the
curves; none for the theorem, whose assumption A1 is a perfect fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import fxprec
from benchmarks import machine

DIM, SAMPLES, STEPS, LR = 10, 2000, 15_000, 0.01
EPSILON = 2.0**-8  # machine epsilon of bf16 in the paper's sense: half the largest relative gap
FIGURE = Path(__file__).parents[2] / "docs" / "optim-least-squares.svg"


def q(x: Any) -> Any:
    """Nearest bf16."""
    return torch.as_tensor(x, dtype=torch.float32).bfloat16().float()


def problem(noise: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(SAMPLES, DIM)), rng.uniform(0, 100, DIM)
    y = x @ w + noise * rng.normal(size=SAMPLES)
    return (torch.tensor(v, dtype=torch.float32) for v in (x, w, y))  # type: ignore[return-value]


def train(kind: str, noise: float, order: list[int], record: int = 50) -> dict[str, Any]:
    """One of ``fp32``, ``forward-backward`` (only those rounded) and ``updates`` (the weight update rounded)."""
    x, best, y = problem(noise)
    weight = torch.nn.Parameter(torch.zeros(DIM))
    fmt = "bf16" if kind == "updates" else "fp32"
    opt = fxprec.optim.SGD([weight], lr=LR, update="nearest", format=fmt, count_cancelled=True)
    curve, last = [], 0
    for t, i in enumerate(order):
        row = q(x[i]) if kind == "forward-backward" else x[i]
        error = row @ weight.detach() - y[i]
        if kind == "forward-backward":
            error = q(error)
        grad = error * row
        weight.grad = q(grad) if kind == "forward-backward" else grad
        before = weight.detach().clone()
        opt.step()
        if not torch.equal(before, weight.detach()):
            last = t
        if t % record == 0:
            curve.append(float(((x @ weight.detach() - y) ** 2).mean() / 2))
    distance = float((weight.detach() - best).norm())
    (row_,) = opt.cancelled()
    return {"kind": kind, "noise": noise, "loss": curve[-1], "distance": distance, "last_move": last,
            "cancelled": round(row_.share, 4), "curve": curve}  # fmt: skip


def theorem(order: list[int]) -> dict[str, Any]:
    """Without noise: where the weights halt, the radius inside which every update is cancelled, and the lower bound."""
    x, best, _ = problem(0)
    best = q(best)  # an optimum that bf16 has: else no bf16 weights lie inside the radius at all
    lipschitz = float((x**2).sum(1).max())
    smallest = float(best.abs().min())
    radius = EPSILON / (LR * lipschitz + EPSILON) * smallest
    found = train("updates", 0.0, order)
    # The theorem's own claim: from any bf16 weights inside the radius, no sample moves anything.
    rng = np.random.default_rng(1)
    inside, moved = 0, 0
    units = torch.ldexp(torch.ones(DIM), torch.frexp(best).exponent - 8)
    for _ in range(2000):
        steps = torch.tensor(rng.integers(-3, 4, size=DIM)) * (units < radius)
        start = best + steps * units
        if float((start - best).norm()) > radius:
            continue
        inside += 1
        i = int(rng.integers(SAMPLES))
        grad = (x[i] @ (start - best)) * x[i]
        moved += not torch.equal(q(start - LR * grad), start)
    lower = EPSILON * (1 - LR * lipschitz) / (LR * lipschitz + EPSILON) * smallest if LR * lipschitz <= 1 else 0.0
    halted = {k: v for k, v in found.items() if k != "curve"}
    return {"lipschitz": lipschitz, "smallest_weight": smallest, "radius": radius, "lower_bound": lower,
            "starts_inside": inside, "moved": moved, **halted}  # fmt: skip


def draw(rows: list[dict[str, Any]], record: int = 50) -> None:
    """A plain SVG: steps across, loss on a logarithmic scale."""
    width, height, left, top = 640, 360, 60, 20
    losses = [v for r in rows for v in r["curve"]]
    low, high = np.log10(min(losses)) - 0.1, np.log10(max(losses)) + 0.1
    colours = {"fp32": "#222", "forward-backward": "#1f77b4", "updates": "#d62728"}
    texts = {"fp32": "float32", "forward-backward": "bf16 forward and backward", "updates": "bf16 weight updates"}

    def at(i: int, v: float) -> str:
        x = left + i * record / STEPS * (width - left - 20)
        return f"{x:.1f},{top + (high - np.log10(v)) / (high - low) * (height - top - 50):.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="white"/>']  # fmt: skip
    for power in range(int(np.ceil(low)), int(high) + 1):
        y = at(0, 10.0**power).split(",")[1]
        parts.append(
            f'<line x1="{left}" x2="{width - 20}" y1="{y}" y2="{y}" stroke="#ddd"/><text x="10" y="{y}">1e{power}</text>'
        )
    for n, r in enumerate(rows):
        points = " ".join(at(i, v) for i, v in enumerate(r["curve"]))
        parts.append(f'<polyline fill="none" stroke-width="1.5" stroke="{colours[r["kind"]]}" points="{points}"/>')
        parts.append(f'<text x="{width - 230}" y="{40 + 18 * n}" fill="{colours[r["kind"]]}">{texts[r["kind"]]}</text>')
    parts.append(
        f'<text x="{left}" y="{height - 12}">{STEPS} steps of SGD, training loss; least squares, 10 dimensions</text></svg>'
    )
    FIGURE.write_text("\n".join(parts) + "\n", encoding="utf-8")


def main() -> None:
    order = np.random.default_rng(2).integers(SAMPLES, size=STEPS).tolist()
    rows = [train(kind, 0.5, order) for kind in ("fp32", "forward-backward", "updates")]
    halt = theorem(order)
    for r in [*rows, halt]:
        print({k: v for k, v in r.items() if k != "curve"})
    draw(rows)
    print("wrote", machine.save("optim-least-squares", {"curves": rows, "theorem": halt}), FIGURE.name)


if __name__ == "__main__":
    main()
