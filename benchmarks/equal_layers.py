"""Compiling a model block by block, or whole: CPU seconds of one block, and of twelve that are equal.

    python -m benchmarks.equal_layers
    python -m benchmarks.equal_layers --sides "whole, inductor" "whole, fp8"

Blocks of a transformer behind an embedding, each compiled by itself, from ``compile()`` to the end of the first
training step: by Inductor, by ``block.compile(backend="fxprec")``, and with one `fxprec.Backend` for all. Or the whole
model is one graph: by Inductor under bfloat16 autocast, and by fxprec in fp8. Each process starts with an empty cache
folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from benchmarks import machine
from benchmarks.warm_start import cpu

SIDES = ("name", "backend", "inductor", "whole, inductor", "whole, fp8")


class Block(nn.Module):
    """(batch, length, 64) to the same: attention of four heads, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.qkv, self.out, self.up, self.down = (nn.Linear(*s) for s in ((64, 192), (64, 64), (64, 256), (256, 64)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def one_step(side: str, count: int) -> dict[str, Any]:
    """Compile ``count`` blocks and run one step; seconds of this process and of the compilers it starts."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(count)]
    net = nn.Sequential(nn.Embedding(100, 64), *blocks)
    shared = fxprec.Backend(fxprec.Config(recipe="hfp8"))
    start = cpu()
    if side.startswith("whole"):
        return {"side": side, "blocks": count, "cpu_s": round(_of_whole(net, side) - start, 2)}
    for block in blocks:
        if side == "inductor":
            block.compile()
        elif side == "name":
            block.compile(backend="fxprec", options={"recipe": "hfp8"})
        else:
            block.compile(backend=shared)
    net(torch.randint(0, 100, (8, 16))).square().mean().backward()
    row = {"side": side, "blocks": count, "cpu_s": round(cpu() - start, 2)}
    if side == "inductor":
        return row
    backends = dict.fromkeys(fxprec.backend_of(block) for block in blocks)
    return row | {"plans": sum(len(backend.plans) for backend in backends)}


def _of_whole(net: nn.Module, side: str) -> float:
    """Compile a model as one graph and run one step; return the CPU seconds used by then."""
    is_rival = side.endswith("inductor")
    compiled = torch.compile(net, backend="inductor" if is_rival else fxprec.Backend(fxprec.Config(recipe="fp8")))
    with torch.autocast("cpu", torch.bfloat16, enabled=is_rival):
        results = compiled(torch.randint(0, 100, (8, 16)))
    results.float().square().mean().backward()
    return cpu()


def in_process(side: str, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.equal_layers", "--side", side]
        text = subprocess.run([*command, "--blocks", str(count)], env=env, check=True, stdout=subprocess.PIPE).stdout
        found: dict[str, Any] = json.loads(text)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, help="one step of this side, in this process")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="these in turn")
    parser.add_argument("--blocks", type=int, default=12)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(one_step(args.side, args.blocks)))
        return
    rows = []
    for side in args.sides:
        one = in_process(side, 1)
        for row in (one, in_process(side, args.blocks)):
            rows.append(row | {"to_one_block": round(row["cpu_s"] / one["cpu_s"], 2)})
            print(rows[-1], flush=True)
    print(machine.save("equal-layers", rows).name)


if __name__ == "__main__":
    main()
