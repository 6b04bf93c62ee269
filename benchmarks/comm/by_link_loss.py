"""Held-out loss of a small model of characters on 4 ranks, and whether replicas stay bit-identical, by what is sent.

    python -m benchmarks.comm.by_link_loss --steps 1000
    python -m benchmarks.comm.by_link_loss --steps 1000 --ways "bf16 all-reduce" "by link, by nodes"

All ranks are on this machine and the link is given as a slow one, so bits by link choose as they would there.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks import machine
from fxprec.aps import APSState, aps_hook
from fxprec.demo.data import VOCAB, load_text
from fxprec.demo.models import CharTransformer
from fxprec.runtime.aps.link_plan import shares
from fxprec.runtime.aps.link_widths import FOUR_BITS

RANKS, BATCH, LENGTH, LINK = 4, 4, 64, "20Mbit/s, 1ms"
BY_LINK = {"format": "e4m3fn", "bits": "by link", "link": LINK}
NODES = {"group_size": 2, "link": f"{LINK} between; 2Gbit/s inside"}
WAYS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "bf16 all-reduce": BY_LINK | {"widths": (16,)},
    "4 bits": {"format": FOUR_BITS},
    "PowerSGD hook, rank 4": None,
    "by link": BY_LINK,
    "by link, low rank": BY_LINK | {"low_rank": 4},
    "by link, error feedback": BY_LINK | {"error_feedback": True},
    "by link, by nodes": BY_LINK | NODES,
    "by link, by nodes, error feedback": BY_LINK | NODES | {"error_feedback": True},
}


def windows(text: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return stretches of the text (count, LENGTH + 1)."""
    starts = torch.randint(len(text) - LENGTH - 1, (count,), generator=generator)
    return torch.stack([text[s : s + LENGTH + 1] for s in starts.tolist()])


def loss_of(model: torch.nn.Module, chosen: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(chosen[:, :-1]).flatten(0, 1), chosen[:, 1:].flatten())


def trained(name: str, options: dict[str, Any] | None, steps: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    text, model = load_text(), CharTransformer(vocab=VOCAB, context=LENGTH)
    ddp = DistributedDataParallel(model, bucket_cap_mb=100)  # PowerSGD's hook blocks on Gloo with several
    state = None
    if name.startswith("PowerSGD"):
        ddp.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD_hook)
    if options is not None:
        state = APSState(**options, **({"model": ddp} if "bits" in options else {}))
        ddp.register_comm_hook(state, aps_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    plans: dict[str, int] = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(ddp, windows(text.train, BATCH, data)).backward()
        optimizer.step()
        if state is not None and state.by_link is not None and state.by_link.plan is not None:
            plans.setdefault(shares(state.by_link.plan), step)
    with torch.no_grad():
        held_out = loss_of(model.eval(), windows(text.held_out, 512, torch.Generator().manual_seed(0)))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    rows = [torch.empty_like(flat) for _ in range(RANKS)]
    dist.all_gather(rows, flat)
    plan = state.by_link.plan if state is not None and state.by_link is not None else None
    elements = sum(r.elements for r in plan.layers if r.bits == 4) / flat.numel() if plan is not None else None
    return {
        "held_out": float(held_out),
        "replicas_equal": all(torch.equal(rows[0], row) for row in rows),
        "share_in_4_bits": elements,
        "plans": plans,
    }


def rank_of(rank: int, steps: int, seeds: Sequence[int], ways: Sequence[str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for seed in seeds:
        for name in ways:
            rows[name].append(trained(name, WAYS[name], steps, seed))
            if rank == 0:
                print(f"{name:24} seed {seed}: {rows[name][-1]}", flush=True)
    if rank == 0:
        torch.save(rows, Path(folder, "rows.pt"))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ways", nargs="+", metavar="WAY", choices=list(WAYS), default=list(WAYS))
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of, (args.steps, seeds, args.ways, folder), nprocs=RANKS)
        rows = torch.load(Path(folder, "rows.pt"), weights_only=True)
    print(machine.save("aps-by-link-loss", {"ranks": RANKS, "link": LINK, "steps": args.steps, "ways": rows}))


if __name__ == "__main__":
    main()
