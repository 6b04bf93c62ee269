"""Random training programs, compiled by fxprec and compared with float64: outputs, gradients of every value.

    python -m benchmarks.graphs --cases 10000                      # nightly: 0.3 s a case on one idle core
    python -m benchmarks.graphs --cases 10000 --statements 7       # smaller programs, less for each
    python -m benchmarks.graphs --cases 10000 --resume benchmarks/results/2026-11-22-graphs.json
    python -m benchmarks.graphs --only 4711                        # one case: its source, and what is wrong with it

A case is a seed. Formats are nearly exact (1-8-18 beside 1-8-22; bf16 in native storage), so that a wrong gradient
stands out; what rounding explains is measured by noise. A failing case is made smaller, and printed as source.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.graphs.check import Finding, check
from benchmarks.graphs.generate import STATEMENTS, program_of
from benchmarks.graphs.program import Program
from benchmarks.graphs.shrink import shrunk

EVERY = 100  # cases between two writes of the result


@dataclass
class Result:
    """What a run has found so far."""

    first: int
    cases: int = 0
    seconds: float = 0.0
    torchs_own: list[dict[str, Any]] = field(default_factory=list)
    """Cases in which a backend of torch alone has a finding too; not fxprec's."""
    failed: list[dict[str, Any]] = field(default_factory=list)
    storages: dict[str, int] = field(default_factory=dict)
    """Cases by storage."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Cases by the number of statements that they may have."""

    def add(self, seed: int, program: Program, finding: Finding | None, shrink_seconds: float) -> None:
        """Take in one case; a failing one is made smaller first."""
        self.cases += 1
        storage = program.options["storage"]
        self.storages[storage] = self.storages.get(storage, 0) + 1
        if finding is None:
            return
        if finding.by_torch:
            self.torchs_own.append({"seed": seed, **asdict(finding)})
            return
        print(f"case {seed}: {finding.kind}: {finding.detail}", flush=True)
        small = shrunk(program, finding, shrink_seconds)
        print(text_of(small), flush=True)
        self.failed.append({"seed": seed, **asdict(finding), "program": text_of(small)})


def text_of(program: Program) -> str:
    """Return source, inputs and options as text."""
    values = ", ".join(f"{name}: {v.kind} {v.shape}" for name, v in program.values.items())
    options = {name: value for name, value in program.options.items() if value is not None}
    return f"{program.source}# {values}\n# {options}\n"


def run(result: Result, cases: int, shrink_seconds: float, statements: int = STATEMENTS) -> Result:
    """Check cases up to ``cases`` in all, writing the result every now and then."""
    while result.cases < cases:
        seed, start = result.first + result.cases, time.perf_counter()
        program = program_of(seed, statements)
        result.add(seed, program, check(program), shrink_seconds)
        result.sizes[str(statements)] = result.sizes.get(str(statements), 0) + 1
        result.seconds += time.perf_counter() - start
        if result.cases % EVERY == 0 or result.cases == cases:
            machine.save("graphs", asdict(result))
            print(f"{result.cases} of {cases}: {len(result.failed)} failed, {result.seconds:.0f} s", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="in all, those of --resume included")
    parser.add_argument("--statements", type=int, default=STATEMENTS, metavar="N", help="at most, in a program")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first case")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on behind the cases of this result")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these cases, each shown")
    parser.add_argument("--shrink", type=float, default=60.0, metavar="SECONDS", help="at most, for each failing case")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)  # it tells of every cut
    torch.set_num_threads(1)
    if args.only:
        for seed in args.only:
            program = program_of(seed, args.statements)
            print(f"# case {seed}\n{text_of(program)}{check(program) or 'fine'}\n")
        return
    before = None if args.resume is None else json.loads(args.resume.read_text(encoding="utf-8"))["rows"]
    result = run(Result(args.first) if before is None else Result(**before), args.cases, args.shrink, args.statements)
    kinds = Counter(found["detail"].split(":")[0] for found in result.failed)
    print(f"{result.cases - len(result.failed)} of {result.cases} agree; failed: {dict(kinds)}")
    raise SystemExit(bool(result.failed))


if __name__ == "__main__":
    main()
