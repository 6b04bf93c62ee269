"""Item 8: the bytes that a step allocates at its peak, beside the budget that it was planned for."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Literal

import torch

import fxprec
from fxprec.diagnosis.measured import live_peak
from fxprec.errors import BudgetError
from fxprec.gpu_check.ground import Ground, NotHere, present, require, within
from fxprec.gpu_check.samples import transformer

MOST = 1.05
"""Largest peak, as a share of the budget. Plans do not count workspaces and the rounding of sizes to 512 bytes."""
LEAST = "40%"
"""A model whose largest layer takes more cannot meet this budget; the case then reports the least that it can meet."""
BUDGETS: tuple[tuple[str, dict[str, object]], ...] = (
    ("100%", {}),
    ("60%", {}),
    ("40%", {}),
    ("60%", {"ways": ("narrow", "recompute", "offload")}),
)
_DRY: tuple[tuple[str, dict[str, object]], ...] = (("100%", {}), ("80%", {}))


def check(ground: Ground) -> None:
    """Plan and measure a transformer's step for each budget. A case whose budget is out of reach raises `NotHere`."""
    for budget, options in BUDGETS if ground.on_gpu else _DRY:
        name = f"peak_budget={budget!r}{' with offloading' if options else ''}"
        if not ground.has_time(name):
            continue
        with ground.case(name):
            try:
                _fits(ground, budget, options)
            except BudgetError as error:
                if budget != LEAST:
                    raise
                raise NotHere(str(error)) from error
    ground.needs_gpu("bytes that steps allocate, budgets of 60 % and less, offloading")


def _fits(ground: Ground, budget: str, options: dict[str, Any]) -> None:
    """Fail if the plan, or the peak of the last step beyond what was allocated before it, is above the budget."""
    torch.compiler.reset()
    gc.collect()
    width, tokens, layers = (1024, 1024, 4) if ground.on_gpu else (32, 64, 2)
    model = transformer(ground.device, width=width, heads=width // 64 or 1, layers=layers)
    x = torch.randn(4, tokens, width, device=ground.device)
    lowering: Literal["auto", "eager"] = "auto" if ground.on_gpu else "eager"
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", peak_budget=budget, lowering=lowering, strict=True, **options))
    compiled, peak = torch.compile(model, backend=backend), 0
    for _ in range(3 if ground.on_gpu else 1):
        model.zero_grad(set_to_none=True)
        peak = _peak(ground, lambda: compiled(x).square().mean().backward())
    planned = present(backend.plans[0].peak_bytes, "the plan has no peak")
    require(planned.planned <= planned.budget, f"planned {planned.planned} bytes for a budget of {planned.budget}")
    name = f"peak_budget={budget}{' offload' if options else ''}"
    if not ground.on_gpu:
        ground.fact(name, {"budget": planned.budget, "planned": planned.planned})
        return
    facts = {"budget": planned.budget, "planned": planned.planned, "compiled": planned.compiled, "allocated": peak}
    ground.fact(name, facts | {"ratio": round(peak / planned.budget, 4)})
    within("bytes allocated over the budget", peak / planned.budget, MOST)


def _peak(ground: Ground, step: Callable[[], object]) -> int:
    """Return the bytes that a step allocated at its peak, without parameters and inputs."""
    if not ground.on_gpu:
        step()
        return 0
    return live_peak(step, ground.device)
