"""Item 11: a GPU that is not the current one, and gradients exchanged in 8 bits between two GPUs."""

from __future__ import annotations

import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxprec
from fxprec.gpu_check.ground import Ground, distance, require, same, within
from fxprec.gpu_check.samples import hard_numbers, table_of
from fxprec.numerics.formats import parse
from fxprec.numerics.reference import reference_encode

RANKS = 2
ROUNDINGS = 2 * 2.0**-3
"""Relative error of two roundings to e5m2, each of at most 2^-3 of a number."""


def check(ground: Ground) -> None:
    """Run on the second GPU while the first is current; train on both under DDP, with gradients in APS's codes."""
    if ground.on_gpu and torch.cuda.device_count() < RANKS:
        ground.leave_out("a second GPU, DDP", "one GPU")
        return
    if ground.needs_gpu("kernels on cuda:1 while cuda:0 is current"):
        torch.cuda.set_device(0)
        second = torch.device("cuda", 1)
        with ground.case("codes on cuda:1"):
            _codes(second)
        with ground.case("training and fxprec.optim on cuda:1"):
            found, wanted = _trained(second), _trained(torch.device("cuda", 0))
            if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
                same("losses", found, wanted)
            within("relative distance of the losses", distance(found, wanted), 1e-2)
    with ground.case(f"DDP of {RANKS} ranks with APS, {'NCCL' if ground.on_gpu else 'Gloo'}"):
        _exchange(ground)


def _codes(device: torch.device) -> None:
    from fxprec.runtime.gemm.transpose import quantize_transpose

    x, fmt = hard_numbers(65, 130), parse("1-4-3+4")
    q, _, _ = quantize_transpose(x.to(device), table_of([fmt.name], device)[0], fmt)
    same("codes", q, reference_encode(x, fmt))


def _trained(device: torch.device) -> Tensor:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16().to(device)
    compiled = torch.compile(model, backend=fxprec.Backend(fxprec.Config(recipe="fp8")))
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), update="kahan")
    x, losses = torch.randn(64, 256).bfloat16().to(device), []
    for _ in range(4):
        loss = compiled(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def _exchange(ground: Ground) -> None:
    """Fail if ranks differ by a bit, or if their mean differs from float32's by more than two roundings."""
    with tempfile.TemporaryDirectory(prefix="fxprec-gpu-check-") as folder:
        context = mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _rank, (folder, ground.device.type), RANKS, join=False, start_method="spawn" if ground.on_gpu else "fork"
        )
        while not context.join(timeout=1.0):
            pass
        found = [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(RANKS)]
    for name in ("mean", "weights"):
        same(f"{name} on rank 1", found[1][name], found[0][name])
    exact = sum(one["own"].double() for one in found) / RANKS
    what = "relative distance of the mean from float32's"
    ground.fact(what, round(within(what, distance(found[0]["mean"], exact), ROUNDINGS), 4))
    require(bool(found[0]["weights"].isfinite().all()), "weights are not finite")


def _rank(rank: int, folder: str, device_type: str) -> None:
    """Train a model under DDP with APS; write this rank's own gradient, the mean that arrived, and the weights."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(Path(folder, "store")), RANKS)  # type: ignore[attr-defined]
    name = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(name, store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=40))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to(device)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank)).to(device)
    own = torch.cat([g.flatten() for g in torch.autograd.grad(model(x).square().mean(), list(model.parameters()))])
    ddp = DistributedDataParallel(model, device_ids=[rank] if device.type == "cuda" else None)
    ddp.register_comm_hook(fxprec.aps.APSState("e5m2"), fxprec.aps.aps_hook)
    optimizer, mean = torch.optim.SGD(model.parameters(), lr=0.1), torch.empty(0)
    for step in range(3):
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        if step == 0:
            mean = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.save({"own": own.cpu(), "mean": mean.cpu(), "weights": weights.cpu()}, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()
