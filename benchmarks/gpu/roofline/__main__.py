"""Estimate a training step on an H100 from the code Inductor writes for it; needs no GPU.

    python -m benchmarks.gpu.roofline                                   # the Llama block: two minutes on one core
    python -m benchmarks.gpu.roofline --sides autocast "fp8 1 high" --kernels 0.05
    python -m benchmarks.gpu.roofline --network small --code build/code

Counts are exact and the same on every machine; times follow from the rates printed above the table.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.gpu.roofline import table
from benchmarks.gpu.roofline.count import Counted, count
from benchmarks.gpu.roofline.estimate import H100
from benchmarks.gpu.roofline.minimum import minimum
from benchmarks.gpu.roofline.sides import NETWORKS, SIDES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="llama-8b")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), metavar="SIDE")
    parser.add_argument("--kernels", type=float, metavar="GB", help="list the kernels that move so much")
    parser.add_argument("--code", type=Path, metavar="FOLDER", help="write the generated code and the graphs there")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/DATE-NAME.json")
    args = parser.parse_args()
    network, found = NETWORKS[args.network], dict[str, Counted]()
    for name in args.sides:
        start = time.perf_counter()
        found[name] = count(SIDES[name], network, H100)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        if args.code:
            _write(args.code, re.sub(r"\W+", "-", f"{network.name}-{name}"), found[name])
    least = minimum(network, H100)
    print("\n".join(table.lines(found, least, H100)))
    for name, counted in found.items():
        if args.kernels is not None:
            print("\n".join(table.kernels(name, counted, args.kernels * 1e9)))
    if args.save:
        print(machine.save(args.save, table.to_dict(network.name, found, least, H100)).name)
    return 0


def _write(folder: Path, name: str, counted: Counted) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for half, code in counted.code.items():
        (folder / f"{name}-{half}.py").write_text(code, encoding="utf-8")
        (folder / f"{name}-{half}.graph.txt").write_text(counted.graphs[half], encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
