"""Item 5: a two-layer transformer, forward and backward, in each lowering beside the reference lowering."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fxprec
from fxprec.gpu_check.ground import Ground, distance, present, require, same, within
from fxprec.gpu_check.samples import gradients, transformer

TO_FLOAT32 = 0.2
"""Relative distance from float32's gradients that 8-bit storage and 8-bit products may cause."""
BETWEEN_LOWERINGS = 1e-2
"""The same between lowerings, whose sums and functions differ in the last bits, so that some values round otherwise."""


@dataclass
class Step:
    """The loss of one step, its gradients by name, and rows of statistics."""

    loss: Tensor
    gradients: dict[str, Tensor]
    rows: list[dict[str, Any]]


def step(ground: Ground, lowering: str | None, **options: object) -> Step:
    """Run one step of the same model on the same batch; ``lowering`` None runs it uncompiled, in float32."""
    torch.compiler.reset()
    width, tokens = (256, 128) if ground.on_gpu else (32, 16)
    model = transformer(ground.device, width=width, heads=4)
    x = torch.randn(2, tokens, width, generator=torch.Generator().manual_seed(1)).to(ground.device)
    if lowering is None:
        backend, run = None, model.__call__
    else:
        backend = fxprec.Backend(fxprec.Config(recipe="fp8", low_ratio=1.0, lowering=lowering, strict=True, **options))  # type: ignore[arg-type]
        run = torch.compile(model, backend=backend)
    loss = run(x).square().mean()
    loss.backward()
    return Step(loss.detach(), gradients(model), [] if backend is None else backend.stats())


def check(ground: Ground) -> None:
    """Compare gradients and statistics of each lowering with the reference lowering, and the reference with float32."""
    exact = step(ground, None)
    reference: Step | None = None
    with ground.case("reference lowering beside float32"):
        reference = step(ground, "eager")
        ground.fact("gradients beside float32", _compare(reference, exact, TO_FLOAT32))
    with ground.case("the reference lowering twice, bit for bit"):
        again = step(ground, "eager")
        reference = present(reference, "the first run failed")
        for name, value in again.gradients.items():
            same(name, value, reference.gradients[name])
        require(again.rows == reference.rows, "statistics differ")
    if not ground.needs_gpu("lowering='auto', 'inductor' and 'triton' in Inductor's code, products over codes"):
        return
    with ground.case("products over codes, biases, one of them the model's end"):
        ground.fact("gradients of products over codes beside float32", _two_layers(ground))
    for lowering in ("auto", "inductor", "triton"):
        if not ground.has_time(f"lowering={lowering!r}"):
            continue
        with ground.case(f"lowering={lowering!r}"):
            found = step(ground, lowering)
            reference = present(reference, "there is no reference: its case failed")
            ground.fact(f"gradients of {lowering!r} beside 'eager'", _compare(found, reference, BETWEEN_LOWERINGS))
            ground.fact(f"rows of {lowering!r} not equal to the last bit", _rows(found, reference))
    _simulated(ground)


def _simulated(ground: Ground) -> None:
    """Round every counted tensor in float32, in generated kernels, which are others than those of codes."""
    if ground.has_time("storage='simulate', lowering='triton'"):
        with ground.case("storage='simulate', lowering='triton'"):
            found, wanted = (step(ground, lowering, storage="simulate") for lowering in ("triton", "eager"))
            ground.fact("simulated: gradients of 'triton' beside 'eager'", _compare(found, wanted, TO_FLOAT32))


def _two_layers(ground: Ground) -> float:
    """Compare the gradients of the third step, which has scales, with those of float32."""
    width, found = 256, []
    config = fxprec.Config(recipe="fp8", low_ratio=1.0, gemms="low", strict=True)
    for backend in (None, fxprec.Backend(config)):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)).to(ground.device)
        x = torch.randn(4 * width, width, device=ground.device)
        run = model.__call__ if backend is None else torch.compile(model, backend=backend)
        for _ in range(3):
            model.zero_grad()
            loss = run(x).square().mean()
            loss.backward()
        found.append(Step(loss.detach(), gradients(model), []))
    return _compare(found[1], found[0], TO_FLOAT32)


def _compare(found: Step, wanted: Step, bound: float) -> float:
    require(found.gradients.keys() == wanted.gradients.keys(), "a gradient is missing")
    worst = max((distance(found.gradients[name], value), name) for name, value in wanted.gradients.items())
    return round(within(f"relative distance of the gradient of {worst[1]}", worst[0], bound), 5)


def _rows(found: Step, wanted: Step) -> str:
    """Compare statistics row by row; parameters' must be equal to the last bit, since nothing precedes them."""
    require(len(found.rows) == len(wanted.rows), f"{len(found.rows)} rows of statistics, not {len(wanted.rows)}")
    differing = 0
    for mine, theirs in zip(found.rows, wanted.rows, strict=True):
        where = f"{theirs['kind']} {theirs['tensor']}"
        pairs = [(mine[k], theirs[k]) for k in ("amax", "overflow_ratio", "underflow_ratio")]
        if any(a is None or b is None for a, b in pairs[:2]):
            require(pairs[0][0] is pairs[0][1] is None, f"one lowering has no statistics of {where}")
            continue
        equal = all(a == b for a, b in pairs)
        differing += not equal
        require(equal or theirs["kind"] != "param", f"statistics of {where} are {pairs}")
        require(math.isclose(*pairs[0], rel_tol=1e-2), f"amax of {where} is {pairs[0][0]:g}, not {pairs[0][1]:g}")
        for a, b in pairs[1:]:
            require(abs((a or 0.0) - (b or 0.0)) <= 0.01, f"a ratio of {where} is {a:g}, not {b:g}")
    return f"{differing} of {len(wanted.rows)}"
