"""One rank of the papers' table `aps.time`: times all-reduces of layers' gradients, one by one and as one bucket."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fxprec.aps import APSState, aps_hook

LAYERS = {"res5c_branch2a": 2048 * 512, "res5c_branch2b": 512 * 512 * 3 * 3, "res5c_branch2c": 512 * 2048}
"""Gradients of each, as the paper's Figure 11 has them."""
BUCKET_MB = 100  # more than all of them


class Gradients(nn.Module):
    """Parameters whose backward pass costs next to nothing; what is timed is the exchange."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in sizes)

    def forward(self, grads: Tensor) -> Tensor:
        return torch.stack([(p * grads[: p.numel()]).sum() for p in self.layers]).sum()


def seconds(sizes: Sequence[int], state: Any, hook: Callable[..., Any], grads: Tensor, repeats: int) -> float:
    """Median time of a backward pass with its exchange."""
    ddp = DistributedDataParallel(Gradients(sizes), bucket_cap_mb=BUCKET_MB)
    ddp.register_comm_hook(state, hook)
    times = []
    for _ in range(repeats + 1):  # the first builds the buckets
        loss = ddp(grads)
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[(len(times) - 1) // 2]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rank", "world", "repeats", "seed"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("master", "interface", "out"):
        parser.add_argument(f"--{name}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{args.master}:29500", rank=args.rank, world_size=args.world)
    generator = torch.Generator().manual_seed(1000 * args.seed + args.rank)
    grads = 1e-3 * torch.randn(max(LAYERS.values()), generator=generator)
    found = {}
    for name, sizes in {**{n: [size] for n, size in LAYERS.items()}, "merged": list(LAYERS.values())}.items():
        found[name] = {
            "fp16": seconds(sizes, dist.group.WORLD, fp16_compress_hook, grads, args.repeats),
            "aps": seconds(sizes, APSState("e5m2"), aps_hook, grads, args.repeats),
        }
    if args.rank == 0:
        Path(args.out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
