"""Both halves of a network's training step as each side compiles them, on a GPU's fake tensors."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.compile_fx
from torch import nn
from torch.fx import GraphModule, Node

import fxprec.driver.half_compilation
from benchmarks.gpu.absent import CUDA, moved_to_cuda, plan_for
from benchmarks.gpu.attention import choose_as_on_gpu
from benchmarks.gpu.models import LLAMA_70B_BLOCK, LLAMA_BLOCK, Block, Encoder, Shape, Stage
from benchmarks.gpu.roofline.torchao_layers import converted
from fxprec import Backend, Config, compat
from fxprec.compat import copied
from fxprec.driver.half_compilation import CompiledHalf
from fxprec.driver.lowering import Lowering, LoweringChooser
from fxprec.plan import Plan

Compiled = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Network:
    """A network and the size of its input, float32 with a gradient: (batch, tokens, width) of a block."""

    name: str
    build: Callable[[], nn.Module]
    input: tuple[int, ...]
    shape: Shape | None = None
    """Of a transformer's layer."""
    kind: str = "block"
    """``block`` of a Llama, ``encoder`` layer, or ``stage`` of a ResNet."""

    def make(self) -> tuple[nn.Module, torch.Tensor]:
        """Return the network and an input; their memory is never touched."""
        with torch.device("meta"):
            model = self.build()
        return model.to_empty(device="cpu"), torch.empty(self.input, requires_grad=True)


def _block(name: str, shape: Shape, batch: int, tokens: int) -> Network:
    return Network(name, partial(Block, shape), (batch, tokens, shape.width), shape)


NETWORKS = {
    network.name: network
    for network in (
        _block("llama-8b", LLAMA_BLOCK, 2, 4096),
        _block("llama-70b", LLAMA_70B_BLOCK, 1, 4096),
        _block("small", Shape(width=256, hidden=512, heads=4), 2, 128),
        Network("bert", partial(Encoder, 1024, 4096, 16), (32, 512, 1024), Shape(1024, 4096, 16), "encoder"),
        Network("resnet-stage", Stage, (64, 256, 56, 56), kind="stage"),
    )
}


@dataclass(frozen=True)
class Side:
    """A way to compile: ``options`` of fxprec's, or without them torch's own, under bf16 autocast or in float32."""

    name: str
    options: Mapping[str, Any] | None = None
    autocast: bool = False
    torchao: str | None = None
    """The recipe by which torchao converts the linear layers first."""
    multiplies_blocks: bool = False
    """Whether the GPU's tensor cores multiply operands in blocks."""

    @property
    def absent(self) -> str | None:
        """Why this side cannot be counted here, or None."""
        if self.torchao is None or importlib.util.find_spec("torchao") is not None:
            return None
        return "torchao is not installed (pip install --no-deps torchao)"

    def left_out(self, arch: int) -> str | None:
        """Why this side cannot be counted here for a GPU of that architecture, or None."""
        if self.multiplies_blocks and arch < 100:
            return "the GPU's tensor cores do not multiply operands in blocks (--gpu b200)"
        return self.absent


_FP8 = {"recipe": "fp8", "storage": "native"}
SIDES = {
    side.name: side
    for side in (
        Side("fp32"),
        Side("autocast", autocast=True),
        Side("bf16", {"recipe": "bf16"}),
        Side("fp8 1 high", _FP8 | {"low_ratio": 1.0}),
        Side("fp8 0.5 high", _FP8 | {"low_ratio": 0.5}),
        Side("fp8 1 triton", _FP8 | {"low_ratio": 1.0, "lowering": "triton"}),
        Side("hfp8 packed 1", {"recipe": "hfp8", "storage": "packed", "low_ratio": 1.0}),
        Side("mxfp8", {"recipe": "mxfp8"}, multiplies_blocks=True),
        Side("nvfp4", {"recipe": "nvfp4"}, multiplies_blocks=True),
        Side("torchao tensorwise", autocast=True, torchao="tensorwise"),
        Side("torchao rowwise", autocast=True, torchao="rowwise"),
        Side("torchao rowwise, gradients high", autocast=True, torchao="rowwise_with_gw_hp"),
        Side("torchao mxfp8", autocast=True, torchao="mxfp8", multiplies_blocks=True),
        Side("torchao nvfp4", autocast=True, torchao="nvfp4", multiplies_blocks=True),
    )
}


@dataclass
class Halves:
    """What one side's compilation captured."""

    graphs: dict[str, GraphModule] = field(default_factory=dict)
    """``forward`` and ``backward``, lowered, with values on a GPU."""
    plan: Plan | None = None
    scaled: frozenset[str] = frozenset()
    """Halves that read scales of gradients."""
    chooser: LoweringChooser = field(default_factory=lambda: LoweringChooser(CUDA))

    def take(self, gm: GraphModule, is_backward: object) -> None:
        """Keep one half."""
        self.graphs["backward" if is_backward else "forward"] = gm


def capture(side: Side, network: Network, arch: int) -> Halves:
    """Compile a step of ``network`` as ``side`` does, up to what it would give Inductor to write code for."""
    model, x = network.make()
    found = Halves()
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what this machine cannot do
        if side.torchao is not None:
            model = converted(patch, model, side.torchao)
        backend = _plain(found, arch) if side.options is None else _fxprec(found, patch, side.options, arch)
        patch.setattr(fxprec.driver.half_compilation, "multiplies_blocks", lambda device: side.multiplies_blocks)
        with torch.autocast("cpu", torch.bfloat16, enabled=side.autocast):
            y = torch.compile(model, backend=backend)(x)
        torch.autograd.grad(y, [x, *model.parameters()], torch.empty_like(y))
    if isinstance(backend, Backend):
        lowering = found.chooser.for_plan() if found.chooser.halves else None
        found.plan = replace(backend.plans[0], lowering=lowering)
    return found


def _plain(found: Halves, arch: int) -> Callable[[GraphModule, Sequence[Any]], Any]:
    def half(gm: GraphModule, examples: Sequence[Any], **options: Any) -> Compiled:
        found.take(moved_to_cuda(copied(gm)), options.get("is_backward"))
        return _stand_in(gm)

    def backend(gm: GraphModule, examples: Sequence[Any]) -> Any:
        choose_as_on_gpu(gm, arch)
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return torch._inductor.compile_fx.compile_fx(gm, examples, inner_compile=half)

    return backend


def _fxprec(found: Halves, patch: pytest.MonkeyPatch, options: Mapping[str, Any], arch: int) -> Backend:
    def half(
        self: fxprec.driver.half_compilation.Halves,
        gm: GraphModule,
        examples: Sequence[Any],
        options: Mapping[str, Any],
        name: str,
    ) -> CompiledHalf:
        twin = moved_to_cuda(copied(gm))
        on_gpu = replace(self, device_type="cuda")
        if self.lowering.name == "auto":
            twin, lowered = found.chooser.lower(twin, partial(on_gpu._lower, name), frozenset(), name)
        else:
            lowered = on_gpu._lower(name, twin, self.lowering.name, frozenset())
        if name == "forward":
            self.seen_by_forward = frozenset(lowered.rows)
        found.take(twin, name == "backward")
        found.scaled |= {name} if self.scales(name) else set()
        return CompiledHalf(_stand_in(gm), None, lowered, len(gm.graph.output_node().args[0]))  # type: ignore[arg-type]

    plan_for(patch, arch, traces_only=True)
    patch.setattr(fxprec.driver.half_compilation.Halves, "compile", half)
    patch.setattr(Lowering, "_available", lambda self: self.config.lowering)
    return Backend(Config(**options))


def _stand_in(gm: GraphModule) -> Compiled:
    """Return a function that gives results as the graph's, their memory never touched."""
    results = [n.meta.get("val") if isinstance(n, Node) else n for n in gm.graph.output_node().args[0]]  # type: ignore[union-attr]

    def run(args: list[Any]) -> list[Any]:
        args.clear()
        return [
            torch.empty_strided(tuple(map(int, r.shape)), tuple(map(int, r.stride())), dtype=r.dtype)
            if isinstance(r, torch.Tensor)
            else r
            for r in results
        ]

    return compat.boxed(run)  # type: ignore[no-any-return]
