"""The demo's results: one table for people, on a terminal or in a file."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from fxprec.console import columns
from fxprec.demo.train import Outcome

CAPTION = (
    "Accuracy (test images) and loss (nats a character, held-out text) are of the uncompiled float32 module. "
    "Saved: bytes autograd keeps for backward from the model's forward, whole storages each once, parameters' own "
    "left out. Low: share of elements asked and planned low. Compile is the first step; "
    "train all later ones."
)
_NUMBERS = (
    "accuracy\nor loss", "low\nasked", "low\nreached", "saved\nMB", "vs\nfp32", "promoted", "compile\ns", "train\ns",
)  # fmt: skip


def result_table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one row per outcome, in order; it fits 80 columns."""
    options = {"title": "fxprec demo", "title_justify": "center", "caption": CAPTION, "padding": (0, 1, 0, 0)}
    table = columns(("model", "recipe"), _NUMBERS, **options)
    fp32 = {o.task: o.saved_bytes for o in outcomes if o.recipe == "fp32"}
    for i, outcome in enumerate(outcomes):
        last = i + 1 == len(outcomes) or outcomes[i + 1].task != outcome.task
        table.add_row(*_row(outcome, fp32.get(outcome.task)), end_section=last)
    return table


def score_text(outcome: Outcome) -> str:
    """Return ``"97.77 % accuracy"`` or ``"loss 1.853"``."""
    if outcome.metric == "accuracy":
        return f"{outcome.score:.2%} accuracy"
    return f"{outcome.metric} {outcome.score:.3f}"


def _row(outcome: Outcome, fp32_bytes: int | None) -> list[str]:
    return [
        outcome.task,
        outcome.recipe,
        f"{outcome.score:.2%}" if outcome.metric == "accuracy" else f"{outcome.score:.3f}",
        _ratio(outcome.low_ratio("requested")),
        _ratio(outcome.low_ratio("achieved")),
        f"{outcome.saved_bytes / 1e6:.2f}",
        f"{outcome.saved_bytes / fp32_bytes:.2f}" if fp32_bytes else "-",
        str(outcome.promotions),
        f"{outcome.compile_seconds:.1f}",
        f"{outcome.train_seconds:.1f}",
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
