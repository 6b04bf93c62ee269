"""One rank of the benchmark of bits by link: times steps of every way in turn, and reads the bytes of its interface."""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from fxprec.aps import APSState, aps_hook
from fxprec.runtime.aps.by_link import FOUR_BITS, MEASURED, TRIALS

LAYERS, WIDTH, BATCH = 8, 512, 64
WARM_UP, OF_PLAN = 3, MEASURED + 3 + 5 * TRIALS


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text(encoding="utf-8"))


def bytes_of_barriers() -> int:
    """Return what a step that sends nothing sends."""
    dist.barrier()
    before = sent_bytes()
    dist.barrier()
    return sent_bytes() - before


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def power_sgd(ddp: DistributedDataParallel) -> PowerSGDState:
    return PowerSGDState(dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2)


Hook = Callable[..., Any]
WAYS: dict[str, tuple[Callable[[DistributedDataParallel], Any], Hook] | None] = {
    "fp32": None,
    "fp16 hook": (lambda ddp: dist.group.WORLD, fp16_compress_hook),  # torch refuses its bf16 hook on Gloo
    "PowerSGD hook, rank 4": (power_sgd, powerSGD_hook),
    "16 bits": (lambda ddp: APSState("e4m3fn", bits="by link", model=ddp, widths=(16,)), aps_hook),
    "8 bits": (lambda ddp: APSState("e4m3fn"), aps_hook),
    "4 bits": (lambda ddp: APSState(FOUR_BITS), aps_hook),
    "4 bits, by nodes": (lambda ddp: APSState(FOUR_BITS, group_size=2), aps_hook),
    "by link": (lambda ddp: APSState("e4m3fn", bits="by link", model=ddp), aps_hook),
}


class Way:
    """A replica whose gradients go one way; its weights stay, so each step has the same gradients."""

    def __init__(self, name: str, inputs: Tensor, targets: Tensor) -> None:
        # PowerSGD waits inside of callbacks, which on Gloo blocks for good where several buckets are under way.
        self.ddp = DistributedDataParallel(model(), bucket_cap_mb=100 if name.startswith("PowerSGD") else 1)
        self.state: Any = None
        if (way := WAYS[name]) is not None:
            self.state = way[0](self.ddp)
            self.ddp.register_comm_hook(self.state, way[1])
        self.inputs, self.targets = inputs, targets
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.sent: list[int] = []

    def step(self) -> None:
        self.ddp.zero_grad()
        dist.barrier()
        before, start, processor = sent_bytes(), time.perf_counter(), time.process_time()
        nn.functional.cross_entropy(self.ddp(self.inputs), self.targets).backward()
        self.seconds.append(time.perf_counter() - start)
        self.processor.append(time.process_time() - processor)
        dist.barrier()
        self.sent.append(sent_bytes() - before)

    def gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.ddp.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rank", "world", "rounds"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(600, exit=True)
    dist.init_process_group("gloo", "tcp://10.78.0.1:29500", rank=args.rank, world_size=args.world)
    generator = torch.Generator().manual_seed(args.rank)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    ways = {name: Way(name, inputs, inputs[:, :10].argmax(1)) for name in WAYS}
    for way in ways.values():
        for _ in range(WARM_UP if getattr(way.state, "by_link", None) is None else OF_PLAN):
            way.step()
        for measured in (way.seconds, way.processor, way.sent):
            measured.clear()
    barriers = []
    for turn in range(args.rounds):  # each begins with another way
        barriers.append(bytes_of_barriers())
        order = list(ways.values())
        for way in order[turn % len(order) :] + order[: turn % len(order)]:
            way.step()
    exact = ways["fp32"].gradient()
    rows = {}
    for name, way in ways.items():
        slowest = torch.tensor(way.seconds)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        sent = torch.tensor(way.sent, dtype=torch.float64) - torch.tensor(barriers)
        dist.all_reduce(sent)
        processor = torch.tensor(statistics.median(way.processor), dtype=torch.float64)
        dist.all_reduce(processor)
        error = float((way.gradient() - exact).square().sum() / exact.square().sum())
        seconds = statistics.median(slowest.tolist())
        rows[name] = {
            "seconds": seconds,
            "processor_seconds": float(processor) / args.world,
            "bytes_sent": statistics.median(sent.tolist()) / args.world,
            "error": error,
        }
    plan = ways["by link"].state.by_link.plan
    if args.rank == 0:
        shares = Counter({b: sum(r.elements for r in plan.layers if r.bits == b) for b in (32, 16, 8, 4)})
        texts = [f"{n / shares.total():.0%} in {b} bits" for b, n in shares.items() if n]
        found = {"ways": rows, "plan": plan.to_dict(), "shares": ", ".join(texts)}
        Path(args.out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
