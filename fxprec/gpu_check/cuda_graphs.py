"""Item 7: CUDA graphs, as mode="reduce-overhead" makes them: nothing skipped, nothing copied, the same losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor, nn

import fxprec
from fxprec import compat
from fxprec.compat import observed
from fxprec.driver.interpreter import interpreted
from fxprec.errors import ConfigError
from fxprec.gpu_check.ground import Ground, present, require, same

STEPS = 6


@dataclass
class Run:
    """Losses of a few steps, static inputs of the compiled halves, and the number of skipped CUDA graphs."""

    losses: Tensor
    parameters: int
    """Number of the model's parameters and buffers."""
    static: list[int] = field(default_factory=list)
    """Number of static inputs of each half, forward's first."""
    skips: int = 0
    recorded: int = 0
    held_bytes: int = 0
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


class Compiler:
    """Wraps Inductor's compiler of one half, and records the number of static inputs."""

    def __init__(self, compile_half: Callable[..., object]) -> None:
        self.compile_half, self.static = compile_half, list[int]()

    def __call__(
        self, gm: torch.fx.GraphModule, examples: object, *, static_input_idxs: Sequence[int], **options: object
    ) -> object:
        """Compile one half, and record how many of its inputs have a fixed address."""
        self.static.append(len(static_input_idxs))
        return self.compile_half(gm, examples, static_input_idxs=static_input_idxs, **options)


def run(ground: Ground, mode: str) -> Run:
    """Train a small network with BatchNorm, whose forward writes to its buffers."""
    torch.compiler.reset()
    observed.forget_counts()
    model, x = _model(ground)
    state = [*model.parameters(), *model.buffers()]
    compiler = Compiler(compat.compile_fx_inner if ground.on_gpu else lambda gm, examples, **options: interpreted(gm))
    config = fxprec.Config(recipe="fp8", low_ratio=1.0, mode=mode, strict=True)  # type: ignore[arg-type]
    compiled = torch.compile(model, backend=fxprec.Backend(config))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
    with observed.compiling_anew(), mock.patch.object(compat, "compile_fx_inner", compiler):
        for _ in range(STEPS if ground.on_gpu else 1):
            torch.compiler.cudagraph_mark_step_begin()
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
    found = Run(torch.stack(losses).cpu(), len(state), compiler.static)
    found.skips = observed.skipped_cuda_graphs()
    found.recorded = observed.recorded_cuda_graphs(ground.device)
    if ground.on_gpu:
        found.held_bytes = torch.cuda.memory_allocated(ground.device)
    return found


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
