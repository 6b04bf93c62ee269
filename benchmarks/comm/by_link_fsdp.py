"""Held-out loss of a small model of characters under FSDP2 on 4 ranks, and the bytes a rank sends, by what is sent.

    python -m benchmarks.comm.by_link_fsdp --steps 500 --seeds 3

Needs root and iproute2: ranks run in a network namespace of their own (fxfsdp), whose loopback counts the bytes. The
link is given as a slow one, so bits by link choose as they would there. A forward pass alone only gathers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks import machine
from benchmarks.comm.by_link_loss import BATCH, LENGTH, LINK, NODES, RANKS, loss_of, windows
from benchmarks.comm.slow_link import inside, ip
from fxprec.aps import APSState, use_aps
from fxprec.demo.data import VOCAB, load_text
from fxprec.demo.models import CharTransformer

SPACE = "fxfsdp"
BY_LINK = {"format": "e4m3fn", "bits": "by link", "link": LINK}
EVERY = 100
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]] | None] = {
    "bf16": None,
    "gathers in 8 bits": ({"parameters": "int8/128:bf16"}, BY_LINK | {"widths": (16,)}),
    "gathers of 4-bit differences": (
        {"parameters": "int4/64:bf16", "exact_every": EVERY},
        BY_LINK | {"widths": (16,)},
    ),
    "by link": ({"parameters": "by link"}, BY_LINK),
    "by link, differences": ({"parameters": "by link", "exact_every": EVERY}, BY_LINK),
    "by link, differences, by nodes": ({"parameters": "by link", "exact_every": EVERY}, BY_LINK | NODES),
}
"""All compute in bf16; options of `use_aps` and of the state."""


def sent_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text(encoding="utf-8"))


def bytes_of(work: Callable[[], object]) -> float:
    """Return the bytes that a rank sends meanwhile; barriers' own are taken off."""

    def measured(inner: Callable[[], object]) -> int:
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        inner()
        dist.barrier()
        return sent_bytes() - before

    bare = statistics.median(measured(lambda: None) for _ in range(5))
    return float(statistics.median(measured(work) for _ in range(5)) - bare) / RANKS


def sharded(name: str, model: nn.Module) -> APSState | None:
    mesh, policy = init_device_mesh("cpu", (RANKS,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))
    if (way := WAYS[name]) is None:
        return None
    state = APSState(**way[1], model=model)
    use_aps(model, state, **way[0])
    return state


def trained(name: str, steps: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    text, model = load_text(), CharTransformer(vocab=VOCAB, context=LENGTH)
    state = sharded(name, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = torch.Generator().manual_seed(1000 * seed + dist.get_rank())

    def backward() -> None:
        optimizer.zero_grad()
        loss_of(model, windows(text.train, BATCH, data)).backward()

    def forward() -> None:
        with torch.no_grad():
            model(torch.zeros(1, LENGTH, dtype=torch.long))

    for _ in range(steps):
        backward()
        optimizer.step()
    with torch.no_grad():
        chosen = windows(text.held_out, 512, torch.Generator().manual_seed(0))
        held_out = float(statistics.fmean(float(loss_of(model.eval(), part)) for part in chosen.split(64)))
        rounded = model(chosen[:1, :-1]).float()
    rows = [torch.empty_like(rounded) for _ in range(RANKS)]
    dist.all_gather(rows, rounded)
    found = {"held_out": held_out, "ranks_agree": all(torch.equal(rows[0], row) for row in rows)}
    found |= {"bytes_forward": bytes_of(forward), "bytes_step": bytes_of(backward)}
    if state is not None and state.by_link is not None and state.by_link.plan is not None:
        plan = state.by_link.plan
        found["bits"] = sorted(set(plan.bits.values()))
        found["bits_gathered"] = sorted({row.bits for row in plan.gathered})
    return found


def rank_of(rank: int, steps: int, seeds: int, ways: Sequence[str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for seed in range(seeds):
        for name in ways:
            rows[name].append(trained(name, steps, seed))
            if rank == 0:
                print(f"{name:24} seed {seed}: {rows[name][-1]}", flush=True)
                Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", metavar="WAY", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--inside", metavar="FOLDER", help="run the ranks in this network namespace, results there")
    args = parser.parse_args()
    if args.inside:
        mp.spawn(rank_of, (args.steps, args.seeds, args.ways, args.inside), nprocs=RANKS)
        return
    subprocess.run(["ip", "netns", "del", SPACE], check=False, capture_output=True)
    ip("netns", "add", SPACE)
    with tempfile.TemporaryDirectory() as folder:
        try:
            inside(SPACE, "ip", "link", "set", "lo", "up")
            words = [sys.executable, "-m", "benchmarks.comm.by_link_fsdp", *sys.argv[1:], "--inside", folder]
            env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
            subprocess.run(["ip", "netns", "exec", SPACE, *words], env=env, check=True)
        finally:
            ip("netns", "del", SPACE)
        rows = json.loads(Path(folder, "rows.json").read_text(encoding="utf-8"))
    print(machine.save("aps-by-link-fsdp", {"ranks": RANKS, "link": LINK, "steps": args.steps, "ways": rows}))


if __name__ == "__main__":
    main()
