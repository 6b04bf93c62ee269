"""Measure fxprec on a GPU: correctness, then the rows of docs/gemm.md.

    python -m benchmarks.gpu                 # an H100 or H200: under 8 minutes
    python -m benchmarks.gpu --only gemm     # one section
    python -m benchmarks.gpu --tiny          # everything once at sizes that say nothing; needs no GPU

Writes JSON after every section and prints a short table last. A section that fails is reported; the others run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import time
from pathlib import Path

SECONDS = 400  # nothing new is begun later; what is under way takes a minute at most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; without a GPU in Triton's interpreter")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="run only these sections")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin nothing new after so many seconds")
    parser.add_argument("--repeats", type=int, default=0, help="timed runs of a side; 0: 10, or 1 where tiny")
    parser.add_argument("--out", type=Path, help="folder of the JSON (benchmarks/results)")
    args = parser.parse_args()

    import torch

    cuda = torch.cuda.is_available()
    if not cuda:
        if not args.tiny:
            print("no CUDA device; use --tiny to run everything through without one", file=sys.stderr)
            return 2
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is decorated
    from benchmarks.gpu.sections import SECTIONS
    from benchmarks.gpu.suite import Setting, Suite

    gc.freeze()  # after each section the collector need not walk the libraries, half a second each time
    unknown = set(args.only or ()) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; the sections are {', '.join(SECTIONS)}")
    deadline = time.perf_counter() + args.seconds
    device = torch.device("cuda" if cuda else "cpu")
    suite = Suite(Setting(device, args.tiny, args.repeats or (1 if args.tiny else 10), deadline))
    chosen = {name: section for name, section in SECTIONS.items() if not args.only or name in args.only}
    path = _result_path(args.out, args.tiny, torch.cuda.get_device_name() if cuda else "cpu")
    suite.run(chosen, after=lambda done: _write(path, done))
    print("\n" + "\n".join(row.line() for row in suite.rows if row.wanted))
    for failure in suite.failures:
        print(f"{failure.section:12} FAILED: {failure.reason}")
    print(f"written to {path.name}; {sum(suite.took.values()):.0f} s")
    return 1 if suite.failures or any("error" in row.detail for row in suite.rows) else 0


def _result_path(folder: Path | None, tiny: bool, device: str) -> Path:
    from benchmarks import machine

    word = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    target = folder or (machine.RESULTS if not tiny else Path("build"))
    target.mkdir(parents=True, exist_ok=True)
    return target / f"{machine.describe()['date']}-gpu-{word}{'-tiny' if tiny else ''}.json"


def _write(path: Path, suite: object) -> None:
    from benchmarks import machine
    from benchmarks.gpu.sections import device_facts

    content = {"machine": machine.describe() | device_facts()} | suite.to_dict()  # type: ignore[attr-defined]
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
