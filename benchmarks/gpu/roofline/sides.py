"""Both halves of a network's training step as each side compiles them, on a GPU's fake tensors."""

from __future__ import annotations

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

import fxprec.driver.halves
from benchmarks.gpu.absent import moved_to_cuda, plan_for
from benchmarks.gpu.models import LLAMA_70B_BLOCK, LLAMA_BLOCK, Block, Encoder, Shape, Stage
from fxprec import Backend, Config, compat
from fxprec.driver.capture import copied
from fxprec.driver.fallback import Lowering
from fxprec.driver.halves import CompiledHalf
from fxprec.plan import Plan

Compiled = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Network:
    """A network and the size of its input, float32 with a gradient: (batch, tokens, width) of a block."""

    name: str
    build: Callable[[], nn.Module]
    input: tuple[int, ...]
    shape: Shape | None = None
    """Of a Llama block."""

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
        Network("bert", partial(Encoder, 1024, 4096, 16), (32, 512, 1024)),
        Network("resnet-stage", Stage, (64, 256, 56, 56)),
    )
}


@dataclass(frozen=True)
class Side:
    """A way to compile: ``options`` of fxprec's, or without them torch's own, under bf16 autocast or in float32."""

    name: str
    options: Mapping[str, Any] | None = None
    autocast: bool = False


_FP8 = {"recipe": "fp8", "storage": "native"}
SIDES = {
    side.name: side
    for side in (
        Side("fp32"),
        Side("autocast", autocast=True),
        Side("bf16", {"recipe": "bf16"}),
        Side("fp8 1 high", _FP8 | {"low_ratio": 1.0}),
        Side("fp8 1 stored", _FP8 | {"low_ratio": 1.0, "compute": "stored"}),
        Side("fp8 0.5 high", _FP8 | {"low_ratio": 0.5}),
        Side("fp8 1 triton", _FP8 | {"low_ratio": 1.0, "lowering": "triton"}),
        Side("hfp8 packed 1", {"recipe": "hfp8", "storage": "packed", "low_ratio": 1.0}),
    )
}


@dataclass
class Halves:
    """What one side's compilation captured."""

    graphs: dict[str, GraphModule] = field(default_factory=dict)
    """``forward`` and ``backward``, lowered, with values on a GPU."""
    plan: Plan | None = None

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
        backend = _plain(found) if side.options is None else _fxprec(found, patch, side.options, arch)
        with torch.autocast("cpu", torch.bfloat16, enabled=side.autocast):
            y = torch.compile(model, backend=backend)(x)
        torch.autograd.grad(y, [x, *model.parameters()], torch.empty_like(y))
    if isinstance(backend, Backend):
        found.plan = backend.plans[0]
    return found


def _plain(found: Halves) -> Callable[[GraphModule, Sequence[Any]], Any]:
    def half(gm: GraphModule, examples: Sequence[Any], **options: Any) -> Compiled:
        found.take(moved_to_cuda(copied(gm)), options.get("is_backward"))
        return _stand_in(gm)

    def backend(gm: GraphModule, examples: Sequence[Any]) -> Any:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return torch._inductor.compile_fx.compile_fx(gm, examples, inner_compile=half)

    return backend


def _fxprec(found: Halves, patch: pytest.MonkeyPatch, options: Mapping[str, Any], arch: int) -> Backend:
    def half(
        self: fxprec.driver.halves.Halves,
        gm: GraphModule,
        examples: Sequence[Any],
        options: Mapping[str, Any],
        name: str,
    ) -> CompiledHalf:
        twin = moved_to_cuda(copied(gm))
        on_gpu = replace(self, device_type="cuda")
        lowered = on_gpu._lower(twin, self.lowering.name, frozenset())
        if name == "forward":
            self.seen_by_forward = frozenset(lowered.rows)
        found.take(twin, name == "backward")
        return CompiledHalf(_stand_in(gm), None, lowered, len(gm.graph.output_node().args[0]))  # type: ignore[arg-type]

    plan_for(patch, arch)
    patch.setattr(fxprec.driver.halves.Halves, "compile", half)
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
