"""The doctor's recommendation against policy ``size`` at equal saved bytes, digits and text, three seeds.

In 8 bits both train as float32 does, so there is nothing to choose; so tensors are stored in a format coarse enough to
tell plans apart. Tolerances are shares of the damage of storing everything so. Whole modules and whole groups do not fill a
budget: of all recommendations and all plans of ``size``, two are trained that save the
same bytes to a percent, the fewest, or else the two nearest.
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
SHARES = tuple(i / 20 for i in range(4, 20))
ALIKE = 0.01  # of the bytes
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


def recommendations(task: Task, options: Mapping[str, Any], seed: int) -> tuple[list[dict[str, Any]], float]:
    """Return what the doctor recommends after a few steps for each tolerance, and the damage of storing everything low.

    Of those, the ones that keep some modules high and not all.
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
    advices = [dict(advise(found.ranking, BF16, options, whole * share).options) for share in SHARES]
    return [a for i, a in enumerate(advices) if "keep_high" in a and a not in advices[:i]], whole


def by_size(task: Task, options: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """Return the plans of policy ``size``, one for each number of groups held low, the largest first."""
    everything = _plan(task, {**options, "policy": "size"}, seed)
    low = [g.id for g in sorted((g for g in everything.groups if g.low), key=lambda g: (-g.elements, g.id))]
    return [{**options, "policy": partial(_chosen, low[:count])} for count in range(1, len(low))]


def of_equal_bytes(task: Task, options: Mapping[str, Any], seed: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Return a recommendation and a plan of ``size`` that save the same bytes, and the damage of all low.

    Raises:
        LookupError: if no tolerance has the doctor keep some modules high and not all.
    """
    advices, whole = recommendations(task, options, seed)
    if not advices:
        raise LookupError("no tolerance has the doctor keep some modules high and not all")
    ours, sizes = (
        [(given, _saved(_plan(task, given, seed))) for given in plans]
        for plans in (advices, by_size(task, options, seed))
    )
    pairs = ((a, b) for a in ours for b in sizes)
    (advice, _), (size, _) = min(pairs, key=lambda pair: _apart(pair[0][1], pair[1][1]))
    return advice, size, whole


def _apart(ours: int, theirs: int) -> tuple[float, int]:
    """Sort pairs of bytes: equal to a percent before others, and of those the fewest."""
    apart = abs(ours - theirs) / ours
    return (0.0 if apart < ALIKE else apart), ours


def _chosen(groups: list[int], tensors: object, config: object) -> list[int]:
    return groups


def _plan(task: Task, options: Mapping[str, Any], seed: int) -> Plan:
    torch.compiler.reset()
    model = task.make_model()
    compiled = torch.compile(model, backend="fxprec", options=dict(options))
    compiled(next(task.batches(seed))[0])
    return backend_of(compiled).plans[0]


def _saved(plan: Plan) -> int:
    assert plan.saved_bytes is not None
    return plan.saved_bytes.planned


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
    """Yield the training as recommended and by size at equal bytes; with noise, both again with weights nudged."""
    advice, size, whole = of_equal_bytes(task, {**coarse(low), "lowering": lowering}, seed)
    row = {"task": name, "low": low, "seed": seed, "damage of all low": whole, "kept high": list(advice["keep_high"])}
    yield row | {"side": "recommended"} | trained(task, advice, seed)
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
    return {
        "held out": got.score, "training": sum(losses[-LAST:]) / LAST, "bytes": _saved(got.plans[0]), "cpu": time.process_time() - start,
    }  # fmt: skip
