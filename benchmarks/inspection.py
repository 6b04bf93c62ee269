"""Wall clock, CPU and peak memory of ``fxprec dump``, ``report`` and ``diff``, and whether a second run has the same bytes.

    python -m benchmarks.inspection resnet50

Each command is a process of its own, its start and imports included. The limits are those of the project: each command
under 45 s and 2 GB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine

MODELS = ("resnet50", "transformer12", "llama7b")
RATIO = "0.6"
LIMIT_SECONDS, LIMIT_BYTES = 45, 2 * 10**9
COMMAND = [sys.executable, "-c", "from fxprec.cli import main; main()"]


def measure(*arguments: str) -> dict[str, Any]:
    """Run one command; return seconds of wall clock and CPU, peak resident bytes and the exit code."""
    start = time.perf_counter()
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall, rss = time.perf_counter() - start, usage.ru_maxrss * 1024
    row = {
        "command": f"fxprec {arguments[0]}",
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_bytes": rss,
        "load_average": round(os.getloadavg()[0], 1),  # of the last minute; above the cores, wall clock says little
        "exit_code": os.waitstatus_to_exitcode(status),
        "within_limits": wall < LIMIT_SECONDS and rss < LIMIT_BYTES,
    }
    print(*(f"{k} {v}" for k, v in row.items()), sep="  ", flush=True)
    return row


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def inspect(model: str, place: Path) -> dict[str, Any]:
    """Dump a model twice, once more at another ratio, report, and compare."""
    target = f"examples/models/planned.py:{model}"
    first, second, other = (str(place / name) for name in ("first", "second", "other"))
    rows = [measure("dump", target, "--low-ratio", RATIO, "--out", first)]
    rows.append(measure("dump", target, "--low-ratio", RATIO, "--out", second))
    same = contents(place / "first") == contents(place / "second")
    rows.append(measure("report", first))
    rows.append(measure("diff", first, second))
    measure("dump", target, "--low-ratio", "1", "--out", other)
    rows.append(measure("diff", first, other))
    sizes = {p.name: p.stat().st_size for p in sorted((place / "first" / "graph-0").iterdir())}
    nodes = int((place / "first/graph-0/00-joint.txt").read_text(encoding="utf-8").splitlines()[1].split()[1])
    return {"model": model, "joint_nodes": nodes, "same_bytes": same, "commands": rows, "file_bytes": sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODELS)
    for model in parser.parse_args().models:
        with tempfile.TemporaryDirectory() as place:
            row = inspect(model, Path(place))
        print(model, "same bytes" if row["same_bytes"] else "DIFFERENT BYTES")
        print(machine.save(f"inspection-{model}", row))


if __name__ == "__main__":
    main()
