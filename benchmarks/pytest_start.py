"""What the plugin costs every start of pytest, whether or not a test uses it.

    python -m benchmarks.pytest_start

Pytest collects one empty test, with the plugin and without, in turn; seconds of processor time and of wall clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine

COMMAND = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def start(folder: str, *options: str) -> tuple[float, float]:
    """Return processor and wall-clock seconds of one run."""
    before, begin = os.times(), time.perf_counter()
    subprocess.run([*COMMAND, *options], cwd=folder, check=True, capture_output=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return used, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_nothing.py").write_text(
            "import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n"
        )
        for options in (("-p", "no:fxprec"), ()):
            start(folder, *options)  # warm
        for _ in range(args.times):
            found["without"].append(start(folder, "-p", "no:fxprec"))
            found["with"].append(start(folder))
    row: dict[str, Any] = {"runs": args.times, "torch imported": False}
    for position, name in enumerate(("processor", "wall")):
        pairs = [[run[position] for run in found[side]] for side in ("without", "with")]
        row[f"{name}_s"] = {s: round(statistics.median(v), 4) for s, v in zip(found, pairs, strict=True)}
        added = [b - a for a, b in zip(*pairs, strict=True)]
        row[f"{name}_added_s"] = {"median": round(statistics.median(added), 4)}
        row[f"{name}_added_s"]["quartiles"] = [round(q, 4) for q in statistics.quantiles(added, n=4)]
    print(row)
    print(machine.save("pytest-start", [row]).name)


if __name__ == "__main__":
    main()
