"""One rank of the slow-link benchmark: times all-reduces of a model's gradients in every way, and reads the bytes."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook
from torch.nn.parallel import DistributedDataParallel

from fxprec.aps import APSState, aps_hook

LAYERS, WIDTH = 25, 1000  # 25 layers of a million parameters


def sent_bytes(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


class Gradients(nn.Module):
    """A model whose backward pass costs next to nothing: what is timed is the exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(LAYERS))

    def forward(self, grads: torch.Tensor) -> torch.Tensor:
        return sum((p * grads).sum() for p in self.layers)


def ways() -> dict[str, object]:
    world = dist.group.WORLD
    return {
        "fp32 all-reduce": None,
        "fp16 hook": (world, fp16_compress_hook),
        "torch quantization hook": (world, quantization_pertensor_hook),
        "APS e5m2, fp32 sums": (lambda: APSState("e5m2"), aps_hook),
        "APS 1-5-2, sums in the format": (lambda: APSState("1-5-2", accumulate="format"), aps_hook),
        "APS dynamic tree, fp32 sums": (lambda: APSState("dynamic-tree"), aps_hook),
    }


def measure(way: object, interface: str, repeats: int, rank: int, bucket_mb: int) -> dict[str, float]:
    ddp = DistributedDataParallel(Gradients(), bucket_cap_mb=bucket_mb)
    if way is not None:
        state, hook = way
        ddp.register_comm_hook(state() if callable(state) else state, hook)
    grads = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(rank))
    seconds, sent = [], []
    for step in range(repeats + 1):  # the first builds the buckets
        loss = ddp(grads)
        dist.barrier()
        before, start = sent_bytes(interface), time.perf_counter()
        loss.backward()
        seconds.append(time.perf_counter() - start)
        dist.barrier()
        time.sleep(0.2)
        sent.append(sent_bytes(interface) - before)
        if step == 0:
            continue
    return {"seconds": min(seconds[1:]), "seconds_all": seconds[1:], "bytes_sent": sorted(sent[1:])[len(sent) // 2 - 1]}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rank", "world", "repeats", "bucket-mb"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("master", "interface", "out", "only"):
        parser.add_argument(f"--{name}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{args.master}:29500", rank=args.rank, world_size=args.world)
    found = {}
    for name, way in ways().items():
        if not any(word in name for word in args.only.split(",")):
            continue
        try:
            found[name] = measure(way, args.interface, args.repeats, args.rank, args.bucket_mb)
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = {"error": str(error).splitlines()[0]}
        if args.rank == 0:
            print(name, found[name], flush=True)
    if args.rank == 0:
        Path(args.out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
