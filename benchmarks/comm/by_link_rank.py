"""One rank of the benchmark of bits by link: times steps of every way in turn, and reads the bytes of its interface."""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from fxprec.aps import APSState, LayerBits, LinkPlan, aps_hook
from fxprec.runtime.aps import by_link
from fxprec.runtime.aps.by_link import MEASURED
from fxprec.runtime.aps.link_plan import shares
from fxprec.runtime.aps.link_planner import alike, choose
from fxprec.runtime.aps.link_problem import Problem
from fxprec.runtime.aps.link_widths import FOUR_BITS
from fxprec.runtime.aps.predict import Link

LAYERS, WIDTH, BATCH = 8, 512, 64
NODE, INSIDE = 2, 1e9
WARM_UP = MEASURED + 3
PREDICTED = {
    f"{bits} bits{nodes}": f"{bits} bits{nodes.replace(',', '')}" for bits in (16, 8, 4) for nodes in ("", ", by nodes")
}
"""Ways that send as a plan of one width does, which predicts them."""


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


def by_nodes(ddp: DistributedDataParallel, bits: int) -> APSState:
    """A state whose plan sends all layers in so many bits by nodes."""
    names = [name.removeprefix("module.") for name, _ in ddp.named_parameters()]
    sizes = [p.numel() for p in ddp.parameters()]
    layers = tuple(LayerBits(n, 0, size, bits, 0.0, 0.0, by_nodes=True) for n, size in zip(names, sizes, strict=True))
    known = {"node": NODE, "inside": Link(INSIDE)}
    plan = LinkPlan(dist.get_world_size(), 1e9, 0.0, 1.0, 0.0, (0.0,), 0.0, 0, layers, **known)
    given = "8Gbit/s between; 8Gbit/s inside"
    return APSState("e4m3fn", bits="by link", model=ddp, plan=plan, group_size=NODE, link=given, error_budget=1e9)


Hook = Callable[..., Any]
WAYS: dict[str, tuple[Callable[[DistributedDataParallel], Any], Hook] | None] = {
    "fp32": None,
    "fp16 hook": (lambda ddp: dist.group.WORLD, fp16_compress_hook),  # torch refuses its bf16 hook on Gloo
    "PowerSGD hook, rank 4": (power_sgd, powerSGD_hook),
    "16 bits": (lambda ddp: APSState("e4m3fn", bits="by link", model=ddp, widths=(16,)), aps_hook),
    "8 bits": (lambda ddp: APSState("e4m3fn"), aps_hook),
    "4 bits": (lambda ddp: APSState(FOUR_BITS), aps_hook),
    "4 bits, by nodes": (lambda ddp: APSState(FOUR_BITS, group_size=NODE), aps_hook),
    "16 bits, by nodes": (lambda ddp: by_nodes(ddp, 16), aps_hook),
    "8 bits, by nodes": (lambda ddp: APSState("e4m3fn", group_size=NODE), aps_hook),
    "by link, no low rank": (lambda ddp: APSState("e4m3fn", bits="by link", model=ddp, group_size=NODE), aps_hook),
    "by link": (lambda ddp: APSState("e4m3fn", bits="by link", model=ddp, group_size=NODE, low_rank=4), aps_hook),
}


def noted(problems: list[Problem]) -> Callable[[Problem], LinkPlan]:
    """The planner, which also keeps what it plans from."""

    def chosen(problem: Problem) -> LinkPlan:
        problems.append(problem)
        return choose(problem)

    return chosen


class Way:
    """A replica whose gradients go one way; its weights stay, so each step has the same gradients."""

    def __init__(self, name: str, inputs: Tensor, targets: Tensor) -> None:
        # PowerSGD waits inside of callbacks, which on Gloo blocks for good where several buckets are under way.
        self.ddp = DistributedDataParallel(model(), bucket_cap_mb=100 if name.startswith("PowerSGD") else 1)
        self.state: Any = None
        if (way := WAYS[name]) is not None:
            self.state = way[0](self.ddp)
            self.ddp.register_comm_hook(self.state, self._noting_the_first(way[1]))
        self.inputs, self.targets = inputs, targets
        self.seconds: list[float] = []
        self.exchange: list[float] = []
        """Seconds from the first bucket's gradients to the last mean; none of DDP without a hook."""
        self.processor: list[float] = []
        self.sent: list[int] = []

    def _noting_the_first(self, hook: Hook) -> Hook:
        def called(state: Any, bucket: Any) -> Any:
            if bucket.index() == 0:
                self.first = time.perf_counter()
            return hook(state, bucket)

        called.__annotations__.clear()  # DDP compares them with types of its own
        return called

    def step(self) -> None:
        self.ddp.zero_grad()
        dist.barrier()
        before, start, processor = sent_bytes(), time.perf_counter(), time.process_time()
        nn.functional.cross_entropy(self.ddp(self.inputs), self.targets).backward()
        self.seconds.append(time.perf_counter() - start)
        self.processor.append(time.process_time() - processor)
        if self.state is not None:
            self.exchange.append(time.perf_counter() - self.first)
        dist.barrier()
        self.sent.append(sent_bytes() - before)

    def gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.ddp.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rank", "world", "rounds"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--out")
    parser.add_argument("--ways")
    args = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(600, exit=True)
    dist.init_process_group("gloo", "tcp://10.78.0.1:29500", rank=args.rank, world_size=args.world)
    generator = torch.Generator().manual_seed(args.rank)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    problems: list[Problem] = []
    by_link.choose = noted(problems)
    ways = {name: Way(name, inputs, inputs[:, :10].argmax(1)) for name in args.ways.split(";")}
    for way in ways.values():
        for _ in range(WARM_UP):
            way.step()
        while getattr(way.state, "by_link", None) is not None and way.state.by_link.is_trying:
            way.step()
        for measured in (way.seconds, way.exchange, way.processor, way.sent):
            measured.clear()
    barriers = []
    for turn in range(args.rounds):  # each begins with another way
        barriers.append(bytes_of_barriers())
        order = list(ways.values())
        for way in order[turn % len(order) :] + order[: turn % len(order)]:
            way.step()
    exact = ways["fp32"].gradient()
    plan = ways["by link"].state.by_link.plan
    ends = {p.layers[0].way: p.end for p in alike(replace(problems[-1], budget=float("inf")))}
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
        if way.exchange:
            last = torch.tensor(way.exchange)
            dist.all_reduce(last, op=dist.ReduceOp.MAX)
            rows[name]["exchange"] = statistics.median(last.tolist())
        if name == "by link" or name in PREDICTED:
            rows[name]["predicted"] = plan.end if name == "by link" else ends[PREDICTED[name]]
    if args.rank == 0:
        whole = {key: value for key, value in plan.to_dict().items() if key != "layers"}
        found = {"ways": rows, "plan": whole, "shares": shares(plan)}
        Path(args.out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
