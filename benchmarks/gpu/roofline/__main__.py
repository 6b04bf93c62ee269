"""Estimate a training step on a GPU from the code Inductor writes for it; needs no GPU.

    python -m benchmarks.gpu.roofline                                   # the Llama block: two minutes on one core
    python -m benchmarks.gpu.roofline --sides autocast "fp8 1 high" --kernels 0.05
    python -m benchmarks.gpu.roofline --network small --code build/code
    python -m benchmarks.gpu.roofline --network llama-70b --gpu b200 --save roofline-llama-70b-b200

Counts are exact and the same on every machine; times follow from the rates printed above the table.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.gpu.roofline import chart, table
from benchmarks.gpu.roofline.count import Counted, count
from benchmarks.gpu.roofline.estimate import GPUS
from benchmarks.gpu.roofline.minimum import minimum
from benchmarks.gpu.roofline.sides import NETWORKS, SIDES

NAMES = {rates.name.lower(): arch for arch, rates in GPUS.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="llama-8b")
    parser.add_argument("--gpu", choices=NAMES, default="h100")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), metavar="SIDE")
    parser.add_argument("--kernels", type=float, metavar="GB", help="list the kernels that move so much")
    parser.add_argument("--code", type=Path, metavar="FOLDER", help="write the generated code and the graphs there")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/DATE-NAME.json, and a bar chart")
    args = parser.parse_args()
    network, found = NETWORKS[args.network], dict[str, Counted]()
    arch = NAMES[args.gpu]
    for name in args.sides:
        reason = SIDES[name].left_out(arch)
        if reason is not None:
            print(f"{name}: left out, {reason}", flush=True)
            continue
        start = time.perf_counter()
        found[name] = count(SIDES[name], network, arch)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        if args.code:
            _write(args.code, re.sub(r"\W+", "-", f"{network.name}-{name}"), found[name])
    least = minimum(network, GPUS[arch])
    print("\n".join(table.lines(found, least, GPUS[arch])))
    for name, counted in found.items():
        if args.kernels is not None:
            print("\n".join(table.kernels(name, counted, args.kernels * 1e9)))
    if args.save:
        path = machine.save(args.save, table.to_dict(network.name, found, least, GPUS[arch]))
        path.with_suffix(".svg").write_text(chart.draw(found, least, f"{network.name}, {args.gpu}"), encoding="utf-8")
        print(path.name)
    return 0


def _write(folder: Path, name: str, counted: Counted) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for half, code in counted.code.items():
        (folder / f"{name}-{half}.py").write_text(code, encoding="utf-8")
        (folder / f"{name}-{half}.graph.txt").write_text(counted.graphs[half], encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
