"""The doctor's recommendation against policy ``size`` at the same bytes saved, digits and text, three seeds.

In 8 bits both train as float32 does, so there is nothing to choose; so tensors are stored in a format coarse enough to
tell plans apart. The tolerance is a share of the damage of storing everything so, the least at which the recommendation
keeps some modules high and not all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

import fxprec
from fxprec.demo import data
from fxprec.demo.tasks import Task, cross_entropy, digits_task, text_task
from fxprec.demo.train import train
from fxprec.diagnosis.doctor import doctor

WARM_UP = 30  # steps in float32 before the examination: at first all layers are alike
SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LAST = 40  # steps whose mean training loss is told


def coarse(low: str) -> dict[str, Any]:
    """Return options that store low tensors in a format and compute in float32."""
    return {"recipe": fxprec.Recipe(hi="bf16", lo_forward=low, lo_backward="bf16", name=low), "storage": "packed"}


def tasks() -> dict[str, Task]:
    """Return both tasks, evaluated by held-out loss."""
    digits = data.load_digits()

    def loss(model: torch.nn.Module) -> float:
        return float(F.cross_entropy(model(digits.test_images), digits.test_labels))

    return {
        "digits": dataclasses.replace(digits_task(), metric="loss", evaluate=loss),
        "text": text_task(steps=100, batch=16),
    }


def recommended(task: Task, options: Mapping[str, Any], seed: int) -> tuple[dict[str, Any] | None, float]:
    """Return what the doctor recommends after a few steps, and the damage that storing everything low does.

    None where no tolerance has it keep some modules high and not all.
    """
    torch.manual_seed(seed)
    model, batches = task.make_model(), task.batches(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate / 5)
    for _ in range(WARM_UP):
        inputs, targets = next(batches)
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    inputs, targets = next(batches)

    def examined(tolerance: float) -> Any:
        asked = {**options, "formats": ("bf16",), "reruns": 0, "tolerance": tolerance}
        return doctor(model, inputs, loss=lambda out: cross_entropy(out, targets), options=asked)

    whole = examined(1e-9).whole[0].predicted
    for share in SHARES:
        advice = examined(whole * share).recommended
        if "keep_high" in advice:
            return advice, whole
    return None, whole


def compare(name: str, task: Task, low: str, seed: int, lowering: str = "inductor") -> dict[str, Any]:
    """Train as recommended, then by size within the bytes which that took."""
    options = coarse(low)
    advice, whole = recommended(task, options, seed)
    if advice is None:
        return {"task": name, "low": low, "seed": seed, "damage of all low": whole, "kept high": None}
    runs = {}
    budget = None
    for how in ("recommended", "size"):
        given = advice if how == "recommended" else {**options, "policy": "size", "activation_budget": budget}
        losses: list[float] = []
        got = train(
            task, how, {**given, "lowering": lowering}, seed=seed, on_step=lambda _, loss, to=losses: to.append(loss)
        )
        saved = got.plans[0].saved_bytes
        assert saved is not None
        budget = saved.planned if budget is None else budget
        runs[how] = {
            "held out": got.score, "training": sum(losses[-LAST:]) / LAST, "bytes": saved.planned, "fp32 bytes": saved.fp32
        }  # fmt: skip
    high = list(advice["keep_high"])
    return {"task": name, "low": low, "seed": seed, "damage of all low": whole, "kept high": high} | runs
