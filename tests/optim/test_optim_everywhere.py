"""Under torch.compile, and on several ranks: replicas stay bit-identical, shards draw bits of their own."""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxprec

sys.path.insert(0, str(Path(__file__).parents[1] / "aps"))
from aps_ranks import run_ranks


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return net.bfloat16()


def steps(net: torch.nn.Module, opt: torch.optim.Optimizer, rank: int, count: int = 4) -> None:
    for step in range(count):
        opt.zero_grad()
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        net(x.to(next(net.parameters()).dtype)).float().square().mean().backward()
        opt.step()


def replicated(rank: int, world: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)  # ranks differ in their own generators
    net = torch.nn.parallel.DistributedDataParallel(model())
    steps(net, fxprec.optim.AdamW(net.parameters(), lr=1e-2, betas=(0.9, 0.99)), rank)
    return [p.detach() for p in net.parameters()]


def sharded(rank: int, world: int) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    opt = fxprec.optim.AdamW(net.parameters(), lr=1e-2, betas=(0.9, 0.99), update="kahan", count_cancelled=True)
    steps(net, opt, rank=0)
    assert sum(row.nonzero for row in opt.cancelled()) > 0
    # All of a weight starts at 1 and gets one gradient: only the random bits tell its two halves apart.
    half = torch.nn.Linear(64, 64, bias=False).bfloat16()
    torch.nn.init.ones_(half.weight)
    fully_shard(half, mesh=init_device_mesh("cpu", (world,)))
    half.weight.grad = torch.ones_like(half.weight)
    fxprec.optim.SGD(half.parameters(), lr=1e-3).step()
    found = [p.full_tensor().detach() for p in net.parameters()] + [half.weight.full_tensor().detach()]
    dist.barrier()
    return found


def sharded_in_few_bits(form: Any, rank: int, world: int) -> list[torch.Tensor]:
    """Shards of uneven sizes; half of the training, a state dict through torch's own tools, the other half."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (world,))

    def make(foreach: bool | None = None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5))
        fully_shard(net, mesh=mesh)
        return net, fxprec.optim.AdamW(net.parameters(), lr=1e-2, states=form, foreach=foreach)

    def local(net: torch.nn.Module) -> list[torch.Tensor]:
        return [p.to_local().detach().clone() for p in net.parameters()]

    whole, opt = make()
    for step in range(2):
        steps(whole, opt, rank=step, count=1)
    state = get_optimizer_state_dict(whole, opt)
    entry = state["state"]["0.weight"]["exp_avg"]
    assert isinstance(entry, DTensor)
    assert (entry.dtype, tuple(entry.shape)) == (torch.bfloat16, (33, 8))
    state = copy.deepcopy(state)
    half = local(whole)
    steps(whole, opt, rank=0, count=2)

    other, resumed = make()
    for p, value in zip(other.parameters(), half, strict=True):
        p.to_local().data.copy_(value)
    set_optimizer_state_dict(other, resumed, state)
    steps(other, resumed, rank=0, count=2)
    assert all(map(torch.equal, local(whole), local(other)))

    plain, slow = make(foreach=False)
    for step in range(2):
        steps(plain, slow, rank=step, count=1)
    assert all(map(torch.equal, half, local(plain)))
    dist.barrier()
    return half


def sharded_and_clipped(rank: int, world: int) -> list[torch.Tensor]:
    """The norm is that of all shards: clipped as the whole model is. A last norm is saved and resumes."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = []
    for norm in ("exact", "last"):
        kept: list[torch.Tensor] = []
        state: dict[str, Any] = {}
        for begins in (0, 2):
            net = model().float()
            if begins:
                for p, value in zip(net.parameters(), kept, strict=True):
                    p.data.copy_(value)
            fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
            opt = clipping(net, norm)
            if begins:
                set_optimizer_state_dict(net, opt, state)
            for step in range(begins, begins + 2):
                steps(net, opt, rank=step, count=1)
            kept = [p.full_tensor().detach() for p in net.parameters()]
            state = copy.deepcopy(get_optimizer_state_dict(net, opt))
        found += kept
    dist.barrier()
    return found


def clipping(net: torch.nn.Module, norm: Any) -> torch.optim.Optimizer:
    return fxprec.optim.SGD(net.parameters(), lr=1.0, momentum=0.5, update="nearest", max_norm=1e-3, norm=norm)


def test_shards_are_clipped_by_the_norm_of_all() -> None:
    first, second = run_ranks(2, sharded_and_clipped)
    assert all(map(torch.equal, first, second))
    for norm, found in (("exact", first[:4]), ("last", first[4:])):
        net = model().float()
        start = [p.detach().clone() for p in net.parameters()]
        opt = clipping(net, norm)
        for step in range(4):
            steps(net, opt, rank=step, count=1)
        for ours, whole, old in zip(found, net.parameters(), start, strict=True):
            moved = (whole.detach() - old).norm()
            assert 0 < moved < 0.01
            assert (ours - whole.detach()).norm() <= 1e-3 * moved


@pytest.mark.parametrize("form", ["8bit", "4bit"])
def test_shards_hold_and_resume_averages_in_few_bits(form: str) -> None:
    first, second = run_ranks(2, partial(sharded_in_few_bits, form))
    assert first[0].shape != second[0].shape


def test_replicas_of_ddp_stay_bit_identical() -> None:
    first, second = run_ranks(2, replicated)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], model()[0].weight)


def test_shards_of_fsdp2_step_as_the_whole_model() -> None:
    found, _ = run_ranks(2, sharded)
    net = model()
    steps(net, fxprec.optim.AdamW(net.parameters(), lr=1e-2, betas=(0.9, 0.99), update="kahan"), rank=0)
    for ours, whole in zip(found, net.parameters(), strict=False):
        assert torch.equal(ours, whole.detach())
    moved = (found[-1] != 1).view(2, -1)
    assert moved.any(1).all()
    assert not torch.equal(moved[0], moved[1])


@pytest.mark.inductor
def test_a_compiled_step_gives_the_same_bits() -> None:
    eager, compiled = model(), model()
    options = {"lr": torch.tensor(1e-2), "betas": (0.9, 0.99), "update": "stochastic+kahan", "capturable": True}
    one = fxprec.optim.AdamW(eager.parameters(), **options)  # type: ignore[arg-type]
    two = fxprec.optim.AdamW(compiled.parameters(), **options)  # type: ignore[arg-type]
    step = torch.compile(two.step)
    for count in range(4):
        for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(count)).bfloat16()
            b.grad = a.grad.clone()
        one.step()
        step()
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(one.state[a]["exp_avg_sq"], two.state[b]["exp_avg_sq"])


def test_a_compiled_training_step_checks_and_steps_as_an_eager_one() -> None:
    nets = model(), model()
    opts = [fxprec.optim.SGD(net.parameters(), lr=0.1, momentum=0.5, error_if_nonfinite=True) for net in nets]

    def train(net: torch.nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = net(x).float().square().mean()
        loss.backward()
        opt.step()
        return loss

    compiled = torch.compile(train, backend="aot_eager")
    for count in range(3):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(count)).bfloat16()
        assert torch.equal(train(nets[0], opts[0], x), compiled(nets[1], opts[1], x))
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(fxprec.GradientError, match="has inf or NaN; weights and state are as before this step"):
        compiled(nets[1], opts[1], x * torch.inf)
