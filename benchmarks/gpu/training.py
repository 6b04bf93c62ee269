"""Rows 3 and 4: full training steps (forward, backward, AdamW or SGD), tokens a second and peak memory, by side."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from benchmarks.gpu.models import LLAMA_BLOCK, MODEL_1_5B, TINY, TINY_MODEL, Decoder, ResNetShapes, Shape
from benchmarks.gpu.suite import Row, Setting
from benchmarks.gpu.timing import in_turn, of_host

STEP_WANTED, MEMORY_WANTED = 1.35, 0.70
FP8 = {"recipe": "fp8", "storage": "native"}
FXPREC: dict[str, dict[str, Any]] = {
    "fxprec bf16": {"recipe": "bf16"},
    "fxprec fp8 r=0.5": FP8 | {"low_ratio": 0.5},
    "fxprec fp8 r=1": FP8 | {"low_ratio": 1.0},
    "fxprec fp8 r=1, 16-bit AdamW": FP8 | {"low_ratio": 1.0},
    "fxprec packed r=1": {"recipe": "hfp8", "storage": "packed", "low_ratio": 1.0},
}
_SHORT = ["bf16", "fxprec fp8 r=1, 16-bit AdamW"]  # of a tiny run
TORCHAO = ("torchao tensorwise", "torchao rowwise")


@dataclass
class Step:
    """A compiled training step, with what is needed to free it."""

    run: Callable[[], None]
    backend: fxprec.Backend | None = None


Make = Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]


def block(setting: Setting) -> Iterator[Row]:
    """One Llama-3-8B block, 8,192 tokens, every side."""
    tokens = 64 if setting.tiny else 8192
    sides = [
        "bf16",
        "fxprec fp8 r=1",
        *TORCHAO,
        "fxprec fp8 r=1, 16-bit AdamW",
        "fxprec bf16",
        "fxprec fp8 r=0.5",
        "fp32",
    ]
    sides = _SHORT if setting.tiny else sides
    yield from _compare(
        "block", sides, _decoder(TINY if setting.tiny else LLAMA_BLOCK, tokens, setting), tokens, setting
    )


def model(setting: Setting) -> Iterator[Row]:
    """The 1.5-billion-parameter decoder, 8,192 tokens: compiled bf16 and fxprec's extremes."""
    tokens = 64 if setting.tiny else 8192
    sides = _SHORT[1:] if setting.tiny else ["bf16", "fxprec fp8 r=1", "fxprec bf16"]
    make = _decoder(TINY_MODEL if setting.tiny else MODEL_1_5B, tokens, setting)
    yield from _compare("1.5B model", sides, make, tokens, setting)


def convolutions(setting: Setting) -> Iterator[Row]:
    """ResNet-50's shapes, 128 pictures of 224 x 224."""
    batch, size, width = (2, 32, 2) if setting.tiny else (128, 224, 64)

    def make() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        network = ResNetShapes(width).to(setting.device)
        x = torch.randn(batch, 3, size, size, device=setting.device)
        y = torch.randint(0, 1000, (batch,), device=setting.device)
        return network, lambda m: F.cross_entropy(m(x).float(), y)

    sides = ["bf16", "fxprec packed r=1", "fxprec fp8 r=1", "fxprec bf16", "fp32"]
    sides = sides[:2] if setting.tiny else sides
    yield from _compare("ResNet-50", sides, make, batch, setting)


def _decoder(shape: Shape, tokens: int, setting: Setting) -> Make:
    batch, length = (2, tokens // 2)

    def make() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        with torch.device(setting.device):
            network = Decoder(shape)
            if not shape.vocabulary:
                x = torch.randn(batch, length, shape.width)
                return network, lambda m: m(x).float().square().mean()
            ids = torch.randint(0, shape.vocabulary, (batch, length))
        return network, lambda m: F.cross_entropy(m(ids).float().flatten(0, 1), ids.flatten())

    return make


def _compare(section: str, sides: list[str], make: Make, items: int, setting: Setting) -> Iterator[Row]:
    """Measure each side by itself: two models of a gigabyte each do not share a cache, nor a fair peak of memory."""
    found: dict[str, dict[str, float]] = {}
    for side in sides:
        if setting.is_over:
            yield Row(section, f"{side}: not begun, the time is over", float("nan"), "")
            continue
        try:
            found[side] = _measure(side, make, items, setting)
        except ImportError as error:
            yield Row(section, f"{side}: left out, {error}", float("nan"), "")
            continue
        except Exception as error:  # the other sides still say something
            message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            yield Row(section, f"{side}: FAILED", float("nan"), "", detail={"error": message})
            continue
        yield Row(section, side, found[side]["per_s"], "tokens/s", detail=found[side])
    if "bf16" in found:
        yield from _ratios(section, found)


def _ratios(section: str, found: dict[str, dict[str, float]]) -> Iterator[Row]:
    base = found["bf16"]
    judged = section == "block"
    others = [found[side]["per_s"] for side in TORCHAO if side in found]
    for side in [s for s in found if s.startswith("fxprec")]:
        last = judged and side == "fxprec fp8 r=1"
        speed = found[side]["per_s"] / base["per_s"]
        yield Row(section, f"{side}, speed over bf16", speed, "x", f">= {STEP_WANTED}" if last else "",
                  speed >= STEP_WANTED if last else None)  # fmt: skip
        memory = found[side]["peak_bytes"] / max(base["peak_bytes"], 1)
        yield Row(section, f"{side}, peak memory over bf16", memory, "x", f"<= {MEMORY_WANTED}" if last else "",
                  memory <= MEMORY_WANTED if last else None)  # fmt: skip
        if last and others:
            best = found[side]["per_s"] / max(others)
            yield Row(section, f"{side}, speed over torchao's best", best, "x", ">= 1", best >= 1)


def _measure(side: str, make: Make, items: int, setting: Setting) -> dict[str, float]:
    cuda = setting.device.type == "cuda"
    torch.compiler.reset()
    torch.manual_seed(0)
    if cuda:
        torch.cuda.empty_cache()
    network, loss = make()
    try:
        step = _step(side, network, loss, setting)
        step.run()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        took = in_turn({side: step.run}, setting.device, repeats=setting.repeats, warm_up=2)[side]
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        host = of_host(step.run, setting.device, setting.repeats)
    finally:
        network.to("meta")
    found = {"per_s": items / took, "step_s": took, "host_s": host, "peak_bytes": float(peak)}
    if step.backend is not None:
        gemms = [g for plan in step.backend.plans for g in plan.gemms]
        found |= {"gemms": float(len(gemms)), "gemms_that_pay": float(sum(bool(g.pays) for g in gemms))}
    return found


def _step(side: str, network: nn.Module, loss: Callable[[nn.Module], Tensor], setting: Setting) -> Step:
    backend: Any = "inductor" if setting.compiles else "eager"
    ours = None
    if side in TORCHAO:
        network = _torchao(side, network)
    if side in FXPREC:
        backend = ours = fxprec.Backend(fxprec.Config(lowering="auto" if setting.compiles else "eager", **FXPREC[side]))
    optimizer: torch.optim.Optimizer
    if side.endswith("16-bit AdamW"):
        network = network.bfloat16()
        optimizer = fxprec.optim.AdamW(network.parameters(), lr=1e-4, betas=(0.9, 0.997), update="stochastic")
    else:
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=setting.device.type == "cuda")
    compiled = torch.compile(network, backend=backend)
    # Compiled bf16 as people train: float32 weights, 16-bit operators.
    autocast = side == "bf16" or side in TORCHAO

    def run() -> None:
        with torch.autocast(setting.device.type, torch.bfloat16, enabled=autocast), warnings.catch_warnings():
            warnings.simplefilter("ignore", fxprec.FxprecWarning)
            value = loss(compiled)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Step(run, ours)


def _torchao(side: str, network: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = side.partition(" ")[2]
    return convert_to_float8_training(network, config=Float8LinearConfig.from_recipe_name(recipe))  # type: ignore[no-any-return]
