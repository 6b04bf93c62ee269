"""Bytes of a step by the kernel's counters beside the plan's, in a network of its own: `unshare -rn python` this file.

Prints what a rank sends over what each plan says, for `aps_ranks.run_ranks` of 4 ranks.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist
from aps_ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxprec.aps import APSState, aps_hook
from fxprec.runtime.aps.by_link import MEASURED

WORLD, STEPS = 4, 20
PLANS = {
    "16 bits": {"widths": (16,)},
    "low rank": {"widths": (16,), "low_rank": 4, "error_budget": 9.0},
}


def sent_bytes() -> int:
    """What the loopback interface has sent so far."""
    rows = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return int(next(row for row in rows if row.lstrip().startswith("lo:")).split()[9])


def ratio(rank: int, options: dict[str, object]) -> tuple[float, list[str]]:
    """What the loopback interface sends in a step, a rank, over the plan's bytes; the plan's ways."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]
    ddp = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(512, 4)), bucket_cap_mb=1)
    state = APSState("e4m3fn", bits="by link", model=ddp, link="1Mbit/s, 1ms", **options)
    ddp.register_comm_hook(state, aps_hook)
    x = torch.randn(32, 512, generator=torch.Generator().manual_seed(rank))

    def sent(count: int, *, steps: bool = True) -> int:
        """Bytes of so many steps, each with a barrier after it, or of the barriers alone."""
        dist.barrier()
        before = sent_bytes()
        for _ in range(count):
            if steps:
                ddp.zero_grad()
                nn.functional.cross_entropy(ddp(x), x[:, :4].argmax(1)).backward()
            dist.barrier()
        return sent_bytes() - before

    sent(MEASURED + 3)
    state.by_link._roll_call.stop()  # it asks the store by the same interface, twice a second
    found, plan = (sent(STEPS) - sent(STEPS, steps=False)) / STEPS, state.by_link.plan
    return found / WORLD / plan.bytes_sent, sorted(set(plan.ways.values()))


def ratios(rank: int, world: int) -> dict[str, tuple[float, list[str]]]:
    return {name: ratio(rank, options) for name, options in PLANS.items()}


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print(json.dumps(run_ranks(WORLD, ratios)[0]))
