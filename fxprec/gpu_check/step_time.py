"""Item 10: seconds of a training step beside autocast and torchao. The item only requires that the steps run."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

import fxprec
from fxprec.compat.observed import operators_of
from fxprec.gpu_check.ground import Ground, require
from fxprec.gpu_check.samples import transformer

SIDES = ("autocast", "fxprec fp8", "fxprec fp8, autocast", "torchao tensorwise")
REPEATS = 10
SMALL = 20 << 30  # GPUs with fewer bytes time a layer of half the width


def check(ground: Ground) -> None:
    """Time each side by itself, in the order of `SIDES`, until the time limit."""
    for autocast in (False, True):
        with ground.case(f"operator of attention {'under autocast' if autocast else 'in float32'}"):
            ground.fact(f"attention {'under autocast' if autocast else 'in float32'}", _operators(ground, autocast))
    for side in SIDES:
        if side.startswith("torchao") and (why := _no_torchao(ground)):
            ground.leave_out(side, why)
            continue
        if not ground.has_time(side):
            continue
        with ground.case(side):
            seconds, attention = _measured(ground, side)
            ground.fact(f"{side}: step, ms", round(seconds * 1e3, 3))
            if attention:
                ground.fact(f"{side}: attention planned", attention)
    ground.needs_gpu("how long a step takes: the times are a CPU's, uncompiled")


def _no_torchao(ground: Ground) -> str:
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    return "" if ground.on_gpu and ground.architecture >= 89 else "needs a GPU with products of 8-bit floats"


def _batch(ground: Ground) -> tuple[nn.Module, Tensor]:
    width, tokens = (4096, 2048) if ground.on_gpu else (32, 16)
    if ground.on_gpu and torch.cuda.get_device_properties(ground.device).total_memory < SMALL:
        width //= 2
    model = transformer(ground.device, width=width, heads=width // 128 or 2, layers=1)
    return model, torch.randn(2, tokens, width, device=ground.device)


def _operators(ground: Ground, autocast: bool) -> list[str]:
    """Return the attention operators that a forward pass of the uncompiled model runs; tracing selects the same."""
    model, x = _batch(ground)
    with torch.autocast(ground.device.type, torch.bfloat16, enabled=autocast):
        found = sorted(name for name in operators_of(lambda: model(x)) if "attention" in name)
    require(bool(found), "no operator of attention was seen")
    return found


def _measured(ground: Ground, side: str) -> tuple[float, list[str]]:
    """Return the median seconds of forward, backward and AdamW, and the plan's attention operators."""
    torch.compiler.reset()
    model, x = _batch(ground)
    backend: fxprec.Backend | None = None
    if side.startswith("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found, import-untyped, unused-ignore]

        model = convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("tensorwise"))
    if side.startswith("fxprec"):
        lowering: Literal["auto", "eager"] = "auto" if ground.on_gpu else "eager"
        backend = fxprec.Backend(fxprec.Config(recipe="fp8", low_ratio=1.0, lowering=lowering, strict=True))
    compiled = torch.compile(model, backend=backend or ("inductor" if ground.on_gpu else "eager"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ground.on_gpu)

    def step() -> None:
        with torch.autocast(ground.device.type, torch.bfloat16, enabled=side != "fxprec fp8"):
            loss = compiled(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = _median(ground, step)
    plans = () if backend is None else backend.plans
    return seconds, sorted({gemm.op for plan in plans for gemm in plan.gemms if "attention" in gemm.op})


def _median(ground: Ground, step: Callable[[], None]) -> float:
    for _ in range(3 if ground.on_gpu else 1):
        step()
    if not ground.on_gpu:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    pairs = []
    for _ in range(REPEATS):
        start_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start_event.record()
        step()
        end_event.record()
        pairs.append((start_event, end_event))
    torch.cuda.synchronize(ground.device)
    milliseconds: list[float] = [a.elapsed_time(b) for a, b in pairs]
    return statistics.median(milliseconds) / 1e3
