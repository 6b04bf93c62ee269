"""Zamirai et al. 2020, Figure 5: Kahan summation on more and more of the weights, stochastic rounding on the rest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import nn

import fxprec
from benchmarks.papers import svg
from benchmarks.papers.claims import Claim, Verdict, difference, no_worse, together
from benchmarks.papers.found import Found, Row
from benchmarks.papers.sixteen_bit import KAHAN, Training, constant, rounded
from benchmarks.papers.sixteen_bit_tasks import clicks

TITLE = "Kahan summation on a part of a DLRM's weights"
SOURCE = "Figure 5"
SHARES = (0, 25, 50, 75, 100)
PUBLISHED = {"0 %": {"weight memory": 1.0}, "100 %": {"AUC gained": 0.04, "weight memory": 2.0}}
SMALLER = "A DLRM of 60,000 weights trains on generated clicks for 1,200 steps."
DEVIATES = "Whole tensors are taken, largest first, as near to the share as they come."
SEEDS = 4
STEPS, BATCH, LR = 1200, 128, 0.1


def run(seed: int, full: bool) -> Iterator[Row]:
    """One training run for each share; memory is counted on the tensors."""
    base = None
    for share in SHARES:
        torch.manual_seed(seed)
        training = Training(KAHAN)
        figures = clicks(training, seed, STEPS, BATCH, LR, constant, optimise=partial(_mixed, share=share))
        base = figures["score"] if base is None else base
        cells = {"AUC gained": figures["score"] - base, "weight memory": _memory_of(training.optimizer)}
        yield f"{share} %", {"loss": figures["loss"], "AUC": figures["score"], **cells}


def _memory_of(optimizer: torch.optim.Optimizer) -> float:
    """Weights and compensations, in units of the weights."""
    groups = optimizer.param_groups
    kahan = sum(p.numel() for g in groups if g["update"] == "kahan" for p in g["params"])
    return 1 + kahan / sum(p.numel() for g in groups for p in g["params"])


def _mixed(run: Training, model: nn.Module, share: float) -> None:
    """Two groups of parameters, one optimizer."""
    named = sorted(model.named_parameters(), key=lambda row: -row[1].numel())
    wanted, taken = share / 100 * sum(p.numel() for _, p in named), 0
    kahan, rest = [], []
    for name, p in named:
        is_kahan = taken + p.numel() / 2 <= wanted
        (kahan if is_kahan else rest).append((name, p))
        taken += p.numel() if is_kahan else 0
    with torch.no_grad():
        for _, p in named:
            p.copy_(rounded(p, run.fmt))
    groups = [{"params": g, "update": u} for g, u in ((kahan, "kahan"), (rest, "stochastic")) if g]
    run.optimizer = fxprec.optim.SGD(groups, lr=LR, format=run.fmt)
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, constant)


def _memory(found: Found) -> Verdict:
    reached = found.mean("100 %", "weight memory")
    return Verdict("holds" if reached == 2 else "fails", f"{reached:.2f}x")


def _rises(found: Found) -> Verdict:
    """No step down beyond noise, and the last beyond the first."""
    rows = [f"{share} %" for share in SHARES]
    steps = [no_worse(b, a, "AUC", 0.02, is_loss=False)(found) for a, b in pairwise(rows)]
    gained, error = difference(found, rows[-1], rows[0], "AUC")
    state = "not shown" if abs(gained) <= 2 * error else "holds" if gained > 0 else "fails"
    rises = Verdict(state, f"0 to 100 %: {gained:+.3f} ± {2 * error:.3f} points")
    return Verdict(together(rises, *steps).state, rises.detail)


CLAIMS = [
    Claim(
        "AUC does not fall as Kahan summation takes more weights, and rises in the end (paper: +0.04)",
        _rises,
        "Stochastic rounding alone is as good as 32 bits here (bf16.applications), so there is nothing to gain. "
        "With 12 bits it is not, and Kahan summation gains more than the paper's 0.04 (bf16.formats).",
    ),
    Claim("all weights with Kahan summation take twice the weight memory", _memory),
]


def draw(found: Found) -> str:
    """AUC by share, mean over seeds."""
    lines = {"AUC": [found.mean(f"{share} %", "AUC") for share in SHARES]}
    return svg.curves(lines, "% of weights with Kahan summation", "AUC, %", xs=SHARES)
