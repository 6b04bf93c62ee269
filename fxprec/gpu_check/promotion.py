"""Item 6: an outlier promotes a tensor during training; two equal runs give equal losses and scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fxprec
from fxprec.gpu_check.ground import Ground, require, same

STEPS, OUTLIER = 20, 3  # number of steps; the step whose batch has the outlier


def check(ground: Ground) -> None:
    """Train twice from the same start."""
    runs: list[tuple[Tensor, fxprec.Backend]] = []
    with ground.case(f"an outlier at step {OUTLIER} of {STEPS}"):
        runs.append(train(ground))
        losses, backend = runs[0]
        require(bool(losses.isfinite().all()), "a loss is not finite")
        promoted = [e for e in backend.events if e.kind == "promotion"]
        require(bool(promoted), f"nothing was promoted; events: {sorted({e.kind for e in backend.events})}")
        compilations = sum(len(report.seconds) for report in backend.compile_reports)
        require(compilations > len(backend.compile_reports), "the promotion compiled nothing again")
        ground.fact("promoted", f"{len(promoted)} at step {promoted[0].step}")
    with ground.case("the same run again: losses, scales and promotions"):
        runs.append(train(ground))
        require(len(runs) == 2, "the first run failed")
        same("losses", runs[1][0], runs[0][0])
        scales = [[(r["tensor"], r["scale_exponent"], r["promoted_at"]) for r in b.stats()] for _, b in runs]
        differing = [f"{a}, then {b}" for a, b in zip(*scales, strict=True) if a != b]
        require(not differing, f"{len(differing)} rows differ: {'; '.join(differing[:2])}")


def train(ground: Ground) -> tuple[Tensor, fxprec.Backend]:
    """Return the losses of a perceptron, and the backend that compiled it."""
    torch.compiler.reset()
    torch.manual_seed(0)
    width = 256 if ground.on_gpu else 16
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU())
    model.to(ground.device)
    options: dict[str, Any] = {"recipe": "hfp8", "storage": "packed", "low_ratio": 1.0}
    backend = fxprec.Backend(fxprec.Config(lowering="auto" if ground.on_gpu else "eager", strict=True, **options))
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator, losses = torch.Generator().manual_seed(2), []
    for k in range(STEPS):
        x = torch.randn(64, width, generator=generator) * (1e6 if k == OUTLIER else 1.0)
        loss = compiled(x.to(ground.device)).square().mean().log1p()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu(), backend
