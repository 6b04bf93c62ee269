"""One step on architectures nobody here wrote: loss and gradient against float32, fxprec beside bf16 autocast.

    python -m benchmarks.fidelity                                  # all: about 15 minutes on one idle core
    python -m benchmarks.fidelity --only llama resnet --sides autocast "fp8 1 high"
    python -m benchmarks.fidelity --resume benchmarks/results/2026-11-22-fidelity.json

Results are written after every architecture. What fails is a row with the error's first line. The short training is
``python -m benchmarks.fidelity.training``.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.fidelity.architectures import names
from benchmarks.fidelity.one_step import Row, Step, float32_step, measure
from benchmarks.fidelity.sides import SIDES, available
from benchmarks.fidelity.summary import cell, lines, summarise


def run(
    architectures: Sequence[str],
    sides: Sequence[str],
    lowering: str,
    done: Iterable[Row] = (),
    after: Callable[[list[Row]], object] = lambda rows: None,
) -> list[Row]:
    """Measure every pair that is not ``done``; ``after`` sees all rows after each architecture."""
    rows = {(row.architecture, row.side): row for row in done}
    for i, architecture in enumerate(architectures):
        missing = [side for side in sides if (architecture, side) not in rows]
        reference = _reference(architecture) if missing else None
        for side in missing:
            assert reference is not None
            row = rows[architecture, side] = measure(architecture, side, reference, lowering)
            said = row.error or "; ".join(row.notes[:1])
            print(
                f"{i + 1}/{len(architectures)} {architecture:16} {side:21} {cell(row)} {row.seconds:5.1f} s  {said[:110]}"
            )
        after(list(rows.values()))
    return list(rows.values())


def _reference(architecture: str) -> Step | Exception:
    try:
        return float32_step(architecture)
    except Exception as error:  # each of its rows says so
        return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these architectures")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), metavar="SIDE", help=", ".join(SIDES))
    parser.add_argument("--lowering", choices=("eager", "auto"), default="eager", help="auto: with Inductor, slow")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep this result's rows, except those that failed")
    parser.add_argument("--list", action="store_true", help="name the architectures and sides, and end")
    args = parser.parse_args()
    known = names()
    if args.list:
        print("\n".join([*known, "", *available()]))
        return
    if unknown := set(args.only or ()) - set(known):
        parser.error(f"unknown architecture {', '.join(sorted(unknown))}; --list names them")
    if unknown := set(args.sides or ()) - set(available()):
        parser.error(f"this fxprec has no option compute, which {', '.join(sorted(unknown))} needs")
    warnings.simplefilter("ignore")  # what was left out is in the rows' notes
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it tells of every cut
    torch.set_num_threads(1)
    _run_and_save(args.only or known, args.sides or available(), args.lowering, rows_of(args.resume))


def _run_and_save(architectures: Sequence[str], sides: Sequence[str], lowering: str, done: list[Row]) -> None:
    start, name = time.perf_counter(), "fidelity" if lowering == "eager" else f"fidelity-{lowering}"

    def save(rows: list[Row]) -> Path:
        return machine.save(name, {"summary": summarise(rows, sides), "rows": [asdict(row) for row in rows]})

    rows = run(architectures, sides, lowering, done, save)
    print("\n".join(["", *lines(rows, sides)]))
    print(f"written to {save(rows).name}; {time.perf_counter() - start:.0f} s")


def rows_of(path: Path | None) -> list[Row]:
    if path is None:
        return []
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]["rows"]
    return [Row(**row) for row in found if row["error"] is None]


if __name__ == "__main__":
    main()
