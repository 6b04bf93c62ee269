"""Registers and spills of every Triton kernel of a step's compiled code, for GPUs that are not there.

    python -m benchmarks.gpu.spills                                  # a small block, four architectures: five minutes
    python -m benchmarks.gpu.spills --network llama-8b --arch 90

Inductor's kernels and those generated for ``lowering="triton"``, compiled to machine code by Triton and NVIDIA's
assembler; the disassembler says what a thread uses. Inductor tries a kernel's configurations on the GPU and takes the
fastest, none that spills much; a kernel fails here if all of its configurations spill.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine
from benchmarks.gpu.absent import compiled_kernels, pretend
from benchmarks.gpu.roofline.count import written
from benchmarks.gpu.roofline.sides import NETWORKS, SIDES, Network, Side
from fxprec.numerics import ahead

OURS = ("fp8 1 high", "fp8 1 triton")


def used(side: Side, network: Network, arch: int) -> Iterator[tuple[str, ahead.Resources]]:
    """Yield each kernel of both halves with the least that one of its configurations spills."""
    for half, code in written(side, network, arch).items():
        found: dict[str, ahead.Resources] = {}
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            pretend(patch, arch)
            for name, kernel in compiled_kernels(code, Path(folder)):
                this = ahead.resources(kernel, arch)
                found[name] = min(found.get(name, this), this, key=lambda r: (r.spilled, r.registers))
        yield from ((f"{half} {name}", resources) for name, resources in found.items())


def rows(sides: list[str], network: Network, architectures: list[int]) -> list[dict[str, Any]]:
    """Return one entry a kernel and architecture."""
    found = []
    for arch in architectures:
        for side in sides:
            for name, resources in used(SIDES[side], network, arch):
                found.append({"side": side, "kernel": name, **resources.to_dict(), "fits": resources.fits})
            these = [row for row in found if (row["side"], row["arch"]) == (side, arch)]
            most, spilled = max(row["registers"] for row in these), sum(row["spilled"] > 0 for row in these)
            print(f"sm_{arch} {side}: {len(these)} kernels, at most {most} registers, {spilled} spill", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="small")
    parser.add_argument("--arch", type=int, nargs="+", choices=ahead.ARCHITECTURES, default=list(ahead.ARCHITECTURES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(OURS), metavar="SIDE")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/DATE-NAME.json")
    args = parser.parse_args()
    found = rows(args.sides, NETWORKS[args.network], args.arch)
    failed = [row for row in found if not row["fits"]]
    for row in failed:
        print(f"sm_{row['arch']} {row['side']} {row['kernel']}: {row['registers']} registers, {row['spilled']} spilled")
    if args.save:
        print(machine.save(args.save, found).name)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
