"""Peak of a training step against its time, fxprec beside what stock PyTorch offers.

    python -m benchmarks.memory                                            # all networks and sides, to be resumed, and pictures
    python -m benchmarks.memory --networks unet --sides autocast "fxprec fp8"
    python -m benchmarks.memory --networks unet --sides autocast --one     # one row, in this process, as JSON
    python -m benchmarks.memory --pairs                                    # six networks x ten budgets, to be resumed
    python -m benchmarks.memory --accuracy --seeds 3                       # saved bytes beside what is learned, resumed

Each row runs in a process of its own, since what an allocator holds depends on what ran before. The peak is of live
bytes, by the allocator's events, of one step: what it saves, its temporaries, its parameter gradients.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import machine
from benchmarks.memory.networks import MEASURED, NAMES
from benchmarks.memory.picture import draw
from benchmarks.memory.sides import SIDES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=MEASURED, default=NAMES)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--one", action="store_true", help="print one row as JSON and save nothing")
    parser.add_argument("--pairs", action="store_true", help="peak budgets beside what is measured under them")
    parser.add_argument("--accuracy", action="store_true", help="train digits and text under each recipe")
    parser.add_argument("--seeds", type=int, default=3, help="of --accuracy")
    parser.add_argument("--steps", type=int, default=2000, help="of --accuracy")
    parser.add_argument("--recipes", nargs="+", metavar="RECIPE", help="of --accuracy; float32 and autocast are some")
    args = parser.parse_args()
    if args.accuracy:
        from benchmarks.memory import accuracy

        accuracy.run(args.seeds, args.steps, args.recipes or list(accuracy.SIDES), list(accuracy.TASKS))
        return
    if args.pairs:
        from benchmarks.memory import pairs

        pairs.run()
        return
    if args.one:
        from benchmarks.memory.measure import measure

        print(json.dumps(measure(args.networks[0], args.sides[0])))
        return
    for name in args.networks:
        compare(name, args.sides)


def compare(name: str, sides: Sequence[str]) -> None:
    """Measure the sides that today's result file of a network lacks; keep each as it is done, and the picture."""
    processor = machine.describe()["processor"].partition(":")[0]
    result = f"memory-{name}" if "bf16" in processor else f"memory-{name}-{processor}"
    path = machine.RESULTS / f"{datetime.date.today().isoformat()}-{result}.json"
    rows = {row["side"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    for side in sides:
        if "peak_mb" not in rows.get(side, {}):
            rows[side] = row(name, side)
            path = machine.save(result, list(rows.values()))
    path.with_suffix(".svg").write_text(draw(list(rows.values())), encoding="utf-8")
    print(f"written to {path.name} and {path.with_suffix('.svg').name}")


def row(name: str, side: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.memory", "--one", "--networks", name, "--sides", side]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        found: dict[str, Any] = {"network": name, "side": side, "failed": last}
    else:
        found = json.loads(done.stdout.splitlines()[-1])
    found["took_s"] = round(time.perf_counter() - start)
    print("  ".join(f"{key} {value}" for key, value in found.items() if key != "shape"), flush=True)
    return found


if __name__ == "__main__":
    main()
