"""Two Gloo ranks: DDP in several buckets, FSDP2 whole and by layer, tensor parallel layers; gradients of one process.

Formats are nearly exact, so that a difference is a wrong number. Checkpoints of ranks that promoted other tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from steps import losses_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fxprec
from fxprec.integrations import RankStates, backends_in, compile_layers
from tests.aps.aps_ranks import run_ranks
from tests.backend_helpers import FINE, FINE_TOLERANCE, relative_error
from tests.integrations.small import OPTIONS, Loud, batch

WORLD = 2
Made = tuple[nn.Module, list[int], set[int]]  # the model, whose batches this rank computes, buckets it has sent


class Block(nn.Module):
    """(batch, tokens, 8) to the same shape: a norm, two layers, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = Block(), Block(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


def inputs(rank: int) -> Tensor:
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(rank))


def ddp(options: dict[str, Any], rank: int, *, by_layer: bool) -> Made:
    model, buckets = Net(), set()
    if by_layer:
        compile_layers(model, Block, options)
    else:
        model.compile(backend="fxprec", options=options)

    def hook(_, bucket):
        buckets.add(bucket.index())
        return allreduce_hook(None, bucket)

    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    wrapped.register_comm_hook(None, hook)
    return wrapped, [rank], buckets


def fsdp(options: dict[str, Any], rank: int, *, by_layer: bool) -> Made:
    model = Net()
    if by_layer:
        compile_layers(model, Block, options)
        for block in (model.a, model.b):
            fully_shard(block)
    else:
        model.compile(backend="fxprec", options=options)
    return fully_shard(model), [rank], set()


def tensor_parallel(options: dict[str, Any], rank: int, *, sequence: bool) -> Made:
    model, mesh = Net(), init_device_mesh("cpu", (WORLD,))
    tokens = Shard(1)
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    ends: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=tokens),
            "down": RowwiseParallel(output_layouts=tokens),
        }
        ends = {"head": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate())}
    for block in (model.a, model.b):
        parallelize_module(block, mesh, plan)
    parallelize_module(model, mesh, ends)
    model.compile(backend="fxprec", options=options)
    return model, list(range(WORLD)), set()


MAKE: dict[str, Callable[[dict[str, Any], int], Made]] = {
    "ddp": lambda options, rank: ddp(options, rank, by_layer=False),
    "ddp by layer": lambda options, rank: ddp(options, rank, by_layer=True),
    "fsdp by layer": lambda options, rank: fsdp(options, rank, by_layer=True),
    "fsdp whole": lambda options, rank: fsdp(options, rank, by_layer=False),
    "tensor parallel": lambda options, rank: tensor_parallel(options, rank, sequence=False),
    "sequence parallel": lambda options, rank: tensor_parallel(options, rank, sequence=True),
}


def gradients(model: nn.Module, ranks: list[int], share: int) -> dict[str, Tensor]:
    """After two steps, whole, by the names of `Net`."""
    for _ in range(2):
        model.zero_grad()
        for rank in ranks:
            (model(inputs(rank)).square().mean() / share).backward()
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def all_ways(rank: int, world: int, storage: str) -> dict[str, Any]:
    """By way: the worst relative error to one process without fxprec, plans, buckets and messages."""
    wanted = gradients(Net(), list(range(world)), world)
    options = {"recipe": FINE, "low_ratio": 1.0, "lowering": "eager", "storage": storage}
    found = {}
    for way, make in MAKE.items():
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(optimize_ddp=False):
            warnings.simplefilter("always")
            model, ranks, buckets = make(options, rank)
            got = gradients(model, ranks, len(ranks))
        said = [str(w.message) for w in caught if issubclass(w.category, fxprec.FxprecWarning)]
        found[way] = {
            "error": max(relative_error(got[name], wanted[name]) for name in wanted),
            "plans": {name: len(backend.plans) for name, backend in backends_in(model).items()},
            "buckets": len(buckets),
            "said": said,
        }
    return found


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> Callable[[str], list[dict[str, Any]]]:
    return lambda storage: once(f"parallel-{storage}", lambda: run_ranks(WORLD, all_ways, storage))


@pytest.mark.parametrize("storage", ["simulate", pytest.param("packed", marks=pytest.mark.full)])
@pytest.mark.parametrize("way", MAKE)
def test_gradients_are_those_of_one_process(way: str, storage: str, results: Callable[[str], Any]) -> None:
    for found in (ranks[way] for ranks in results(storage)):
        assert found["error"] < FINE_TOLERANCE
        assert found["plans"] == ({"a": 1, "b": 1} if way.endswith("by layer") else {"": 1})


def test_ddp_sends_several_buckets(results: Callable[[str], Any]) -> None:
    assert all(ranks[way]["buckets"] > 1 for ranks in results("simulate") for way in ("ddp", "ddp by layer"))


def test_only_fsdp_over_the_whole_model_has_something_to_say(results: Callable[[str], Any]) -> None:
    """With layers sharded inside, its hooks would cut the graph at each layer (docs/limits.md)."""
    for ranks in results("simulate"):
        assert {way: found["said"] for way, found in ranks.items() if found["said"]} == {}


class Order(TorchDispatchMode):
    """Logs products and reduce-scatters in the order in which they start."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.log.append("product")
        elif "reduce_scatter" in str(func):
            self.log.append("exchange")
        return func(*args, **(kwargs or {}))


def exchanges(rank: int, world: int) -> dict[str, list[str]]:
    """By way: what the second step's backward starts, in order."""
    options = {"recipe": FINE, "low_ratio": 1.0, "lowering": "eager", "storage": "packed"}
    found = {}
    for by_layer in (True, False):
        torch._dynamo.reset()
        model, _, _ = fsdp(options, rank, by_layer=by_layer)
        model(inputs(rank)).square().mean().backward()
        loss = model(inputs(rank)).square().mean()
        with Order() as order:
            loss.backward()
        found["by layer" if by_layer else "whole"] = order.log
    return found


def test_fsdp_by_layer_exchanges_gradients_while_backward_runs() -> None:
    """Compiled whole, the first exchange starts when the last product of backward has run."""
    for found in run_ranks(WORLD, exchanges):
        product, exchange = ["product"], ["exchange"]
        assert found["by layer"] == product * 2 + (product * 4 + exchange) * 2 + exchange, (
            "head, b, a; what the root has"
        )
        assert found["whole"] == product * 10 + exchange


class Training:
    def __init__(self, rank: int) -> None:
        torch.compiler.reset()
        self.model, self.rank = Loud(), rank
        self.model.compile(backend="fxprec", options=OPTIONS)
        self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)

    def run(self, start: int, stop: int) -> list[Tensor]:
        loud = 100 if self.rank == 1 else 0.01  # one rank promotes what the other does not
        return losses_of(self.wrapped, self.optimizer, (batch(n, self.rank) * loud for n in range(start, stop)))

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "fxprec": RankStates(self.wrapped)}


def resumes(rank: int, world: int, folder: str) -> dict[str, Any]:
    first = Training(rank)
    first.run(0, 4)
    checkpoint.save(first.state(), checkpoint_id=folder)
    wanted = first.run(4, 8)
    second = Training(rank)
    state = second.state()
    checkpoint.load(state, checkpoint_id=folder)
    second.model.load_state_dict(state["model"])
    found = second.run(4, 8)
    promoted = [site.tensor for site in fxprec.backend_of(first.model).plans[0].promoted]
    return {"same": bool(torch.equal(torch.stack(found), torch.stack(wanted))), "promoted": promoted}


def test_a_distributed_checkpoint_keeps_the_state_of_each_rank(tmp_path: Path) -> None:
    first, second = run_ranks(WORLD, resumes, str(tmp_path))
    assert first["promoted"] != second["promoted"]
    assert (first["same"], second["same"]) == (True, True)


def skips(rank: int, world: int) -> tuple[list[bool], int, Tensor]:
    """Whether each step moved a compiled weight, the steps skipped, the weights; rank 0 overflows in step 1."""
    model, moved = Net(), []
    scaling = fxprec.LossScaling(initial=2.0**10, growth_interval=1000)
    options = {"recipe": "fp16", "storage": "simulate", "lowering": "eager", "grad_scaling": scaling}
    compile_layers(model, Block, options)
    ddp = DistributedDataParallel(model)
    weights = [*model.a.parameters(), *model.b.parameters()]
    optimizer = torch.optim.SGD(weights, 0.1)
    for step in range(3):
        before = [p.detach().clone() for p in weights]
        ddp(inputs(rank)).square().mean().mul(1e9 if step == 1 and rank == 0 else 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        moved.append(any(not torch.equal(a, p) for a, p in zip(before, weights, strict=True)))
    skipped = max(backend.skipped_steps for backend in backends_in(model).values())
    return moved, skipped, torch.cat([p.detach().flatten() for p in weights])


def test_ranks_skip_the_same_steps_under_a_dynamic_loss_scale() -> None:
    first, second = run_ranks(WORLD, skips)
    assert first[:2] == second[:2] == ([True, False, True], 1)
    assert first[2].isfinite().all()
    assert torch.equal(first[2], second[2])
