"""The doctor's recommendation against policy ``size``, which saves no fewer bytes, digits and text, three seeds.

In 8 bits both train as float32 does, so there is nothing to choose; so tensors are stored in a format coarse enough to
tell plans apart. The tolerance is a share of the damage of storing everything so, the least at which the recommendation
keeps some modules high and not all.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import fxprec
from fxprec.demo import data
from fxprec.demo.tasks import Task, cross_entropy, digits_task, text_task
from fxprec.demo.train import train
from fxprec.diagnosis.advice import advise
from fxprec.diagnosis.doctor import doctor
from fxprec.driver.named import backend_of
from fxprec.numerics.formats import BF16
from fxprec.plan import Plan

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

    asked = {**options, "formats": ("bf16",), "reruns": 0}
    found = doctor(model, inputs, loss=lambda out: cross_entropy(out, targets), options=asked)
    whole = found.whole[0].predicted
    for share in SHARES:
        advice = advise(found.ranking, BF16, options, whole * share).options
        if "keep_high" in advice:
            return dict(advice), whole
    return None, whole


def by_size(task: Task, options: Mapping[str, Any], seed: int, at_least: int) -> dict[str, Any]:
    """Return options of policy ``size`` that save at least so many bytes: the fewest groups low less than within them.

    Whole groups do not fill a budget; within it ``size`` would save less than the plan that it is compared with.
    """
    given: dict[str, Any] = {**options, "policy": "size", "activation_budget": at_least}
    plan = _plan(task, given, seed)
    low = [g.id for g in sorted((g for g in plan.groups if g.low), key=lambda g: (-g.elements, g.id))]
    while low and plan.saved_bytes is not None and plan.saved_bytes.planned < at_least:
        low.pop()  # some save nothing
        given = {**options, "policy": partial(_chosen, list(low))}
        plan = _plan(task, given, seed)
    return given


def _chosen(groups: list[int], tensors: object, config: object) -> list[int]:
    return groups


def _plan(task: Task, options: Mapping[str, Any], seed: int) -> Plan:
    torch.compiler.reset()
    model = task.make_model()
    compiled = torch.compile(model, backend="fxprec", options=dict(options))
    compiled(next(task.batches(seed))[0])
    return backend_of(compiled).plans[0]


def nudged(task: Task) -> Task:
    """Return the task from initial weights that differ in the last bit: what that changes is noise."""

    def make() -> torch.nn.Module:
        model = task.make_model()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))
        return model

    return dataclasses.replace(task, make_model=make)


def compare(name: str, task: Task, low: str, seed: int, lowering: str, has_noise: bool) -> Iterator[dict[str, Any]]:
    """Yield the training as recommended, by size with no fewer bytes; with noise, both again with weights nudged."""
    options = {**coarse(low), "lowering": lowering}
    advice, whole = recommended(task, options, seed)
    row = {"task": name, "low": low, "seed": seed, "damage of all low": whole}
    if advice is None:
        yield row | {"kept high": None}
        return
    row |= {"kept high": list(advice["keep_high"])}
    found = trained(task, advice, seed)
    yield row | {"side": "recommended"} | found
    size = by_size(task, options, seed, found["bytes"])
    yield row | {"side": "size"} | trained(task, size, seed)
    if not has_noise:
        return
    yield row | {"side": "size, nudged"} | trained(nudged(task), size, seed)
    yield row | {"side": "recommended, nudged"} | trained(nudged(task), advice, seed)


def trained(task: Task, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train; return held-out loss, mean training loss of the last steps, and bytes saved for backward."""
    losses: list[float] = []
    start = time.process_time()
    got = train(task, "", options, seed=seed, on_step=lambda _, loss: losses.append(loss))
    saved = got.plans[0].saved_bytes
    assert saved is not None
    return {
        "held out": got.score, "training": sum(losses[-LAST:]) / LAST, "bytes": saved.planned,
        "fp32 bytes": saved.fp32, "cpu": time.process_time() - start,
    }  # fmt: skip
