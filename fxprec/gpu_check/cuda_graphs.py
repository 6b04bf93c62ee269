"""Item 7: CUDA graphs, as mode="reduce-overhead" makes them: nothing skipped, nothing copied, the same losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fxprec
from fxprec import compat
from fxprec.compat import observed
from fxprec.driver.interpreter import interpreted
from fxprec.errors import ConfigError
from fxprec.gpu_check.ground import Ground, present, require, same

STEPS = 6


@dataclass(frozen=True)
class Run:
    """Losses of a few steps, static inputs of the compiled halves, and the number of skipped CUDA graphs."""

    losses: Tensor
    parameters: int
    """Number of the model's parameters and buffers."""
    static: list[int]
    """Number of static inputs of each half, forward's first."""
    skips: int
    recorded: int
    held_bytes: int
    """Bytes allocated after the last step."""


def check(ground: Ground) -> None:
    """Train with and without CUDA graphs from the same start."""
    plain: Run | None = None
    with ground.case("static inputs are the parameters and buffers"):
        plain = run(ground, "default")
        require(plain.static[:1] == [plain.parameters], f"{plain.static[:1]} of {plain.parameters} are static")
    if not ground.needs_gpu("recording CUDA graphs, and what they hold"):
        return
    with ground.case("mode='reduce-overhead' leaves nothing out"):
        graphs = run(ground, "reduce-overhead")
        require(graphs.skips == 0, f"counters['inductor']['cudagraph_skips'] is {graphs.skips}")
        require(graphs.recorded > 0, "no CUDA graph was recorded")
        require(graphs.static[:1] == [graphs.parameters], f"{graphs.static[:1]} of {graphs.parameters} are static")
        plain = present(plain, "the run without CUDA graphs failed")
        same("losses", graphs.losses, plain.losses)
        ground.fact("CUDA graphs recorded", graphs.recorded)
        ground.fact("bytes held, with CUDA graphs and without", [graphs.held_bytes, plain.held_bytes])
    with ground.case("a capture of one's own is refused"):
        _capture(ground)


def run(ground: Ground, mode: str) -> Run:
    """Train a small network with BatchNorm, whose forward writes to its buffers."""
    torch.compiler.reset()
    observed.forget_counts()
    model, x = _model(ground)
    static, compile_fx_inner = list[int](), compat.compile_fx_inner

    def compile_half(gm: GraphModule, *args: object, static_input_idxs: Sequence[int], **options: object) -> object:
        static.append(len(static_input_idxs))
        if not ground.on_gpu:
            return interpreted(gm)
        return compile_fx_inner(gm, *args, static_input_idxs=static_input_idxs, **options)

    config = fxprec.Config(recipe="fp8", low_ratio=1.0, mode=mode, strict=True)  # type: ignore[arg-type]
    compiled = torch.compile(model, backend=fxprec.Backend(config))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
    with observed.compiling_anew(), mock.patch.object(compat, "compile_fx_inner", compile_half):
        for _ in range(STEPS if ground.on_gpu else 1):
            torch.compiler.cudagraph_mark_step_begin()
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
    return Run(
        losses=torch.stack(losses).cpu(),
        parameters=len([*model.parameters(), *model.buffers()]),
        static=static,
        skips=observed.skipped_cuda_graphs(),
        recorded=observed.recorded_cuda_graphs(ground.device),
        held_bytes=torch.cuda.memory_allocated(ground.device) if ground.on_gpu else 0,
    )


def _model(ground: Ground) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    width = 512 if ground.on_gpu else 16
    model = nn.Sequential(
        nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.GELU(), nn.Linear(2 * width, width)
    )
    return model.to(ground.device), torch.randn(128 if ground.on_gpu else 8, width).to(ground.device)


def _capture(ground: Ground) -> None:
    torch.compiler.reset()
    model, x = _model(ground)
    compiled = torch.compile(model, backend=fxprec.Backend(fxprec.Config(recipe="fp8")))
    compiled(x).square().mean().backward()
    torch.cuda.synchronize(ground.device)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            compiled(x)
    except ConfigError:
        return
    require(False, "torch.cuda.graph captured a compiled model: its scales would stay as they are")
