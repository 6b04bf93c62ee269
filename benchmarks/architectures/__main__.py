"""Train each of many architectures for three steps in fp8 and hfp8 and in nearly exact formats, against float32.

    python -m benchmarks.architectures                             # with the reference lowering: half an hour on one core
    python -m benchmarks.architectures --lowering auto --third     # every third, through Inductor: hours
    python -m benchmarks.architectures --only unet llama --sides near
    python -m benchmarks.architectures --mixed [--checkpoint]      # autocast, dropout, a scaled loss, evaluation between steps
    python -m benchmarks.architectures --resume benchmarks/results/2026-11-22-architectures.json

What ``aot_eager`` does not compile is named and left out. Before the third step every forward tensor held low is
promoted; where there is none, and none is computed again instead, that is a failure. The families take turns. Results are
written after every architecture.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.architectures import mixed
from benchmarks.architectures.registry import Buildable, architectures
from benchmarks.architectures.training import PLAIN, SIDES, Row, measure, reference
from benchmarks.graphs.check import in_a_line


def run(name: str, architecture: Buildable, sides: list[str], lowering: str) -> list[Row]:
    """Return a row a side; one of float32 or ``aot_eager`` alone where that fails as well."""
    try:
        wanted = reference(architecture)
    except Exception as error:
        return [Row(name, "float32", lowering, error=in_a_line(error))]
    rows = [measure(name, architecture, side, wanted, lowering) for side in sides]
    if any(row.error is not None for row in rows):
        plain = measure(name, architecture, PLAIN, wanted)
        rows = rows if plain.error is None else [plain]
    return rows


def summary(rows: list[Row], known: dict[str, Buildable]) -> dict[str, Any]:
    """Return who passed, who failed and who was left out, and the families of those that passed."""
    judged = {*SIDES, *mixed.SIDES}
    compiled = [row for row in rows if row.side in judged]
    failed = sorted({row.architecture for row in compiled if row.error is not None})
    passed = sorted({row.architecture for row in compiled} - set(failed))
    families: dict[str, int] = {}
    for name in passed:
        family = known[name].family if name in known else "of a library not installed here"
        families[family] = families.get(family, 0) + 1
    left_out = {row.architecture: row.error for row in rows if row.side not in judged and row.error is not None}
    return {"passed": len(passed), "families": families, "failed": failed, "not compiled by aot_eager": left_out}


def in_turn(known: dict[str, Buildable]) -> list[str]:
    """Return all names: the first of each family, then the second of each."""
    families: dict[str, list[str]] = {}
    for name, architecture in known.items():
        families.setdefault(architecture.family, []).append(name)
    return [name for row in zip_longest(*families.values()) for name in row if name is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these architectures")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES | mixed.SIDES), help="all by default")
    parser.add_argument("--lowering", choices=("eager", "auto"), default="eager")
    parser.add_argument("--mixed", action="store_true", help="under autocast with dropout, against autocast alone")
    parser.add_argument("--checkpoint", action="store_true", help="with --mixed: under gradient checkpointing")
    parser.add_argument("--third", action="store_true", help="every third architecture")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after these")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="keep this result's rows, but run chosen sides that failed; saves what --only names too",
    )
    parser.add_argument("--list", action="store_true", help="name the architectures by family, and end")
    args = parser.parse_args()
    known = architectures()
    if args.list:
        print("\n".join(f"{architecture.family:16} {name}" for name, architecture in known.items()))
        return
    if (args.checkpoint and not args.mixed) or (args.mixed and args.lowering != "eager"):
        parser.error("--checkpoint needs --mixed, which runs the eager lowering")
    if wrong := set(args.sides or ()) - (mixed.SIDES if args.mixed else SIDES).keys():
        parser.error(f"no side {', '.join(sorted(wrong))} here")
    if unknown := set(args.only or ()) - known.keys():
        parser.error(f"unknown architecture {', '.join(sorted(unknown))}; --list names them")
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # libraries' and Dynamo's advice
    torch.set_num_threads(1)
    _run_and_save(args.only or in_turn(known)[:: 3 if args.third else 1], known, args)


def _run_and_save(chosen: list[str], known: dict[str, Buildable], args: argparse.Namespace) -> None:
    rows, start = _kept(args.resume), time.perf_counter()
    file = "architectures" if args.lowering == "eager" else f"architectures-{args.lowering}"
    file += "-mixed" * args.mixed + "-checkpoint" * args.checkpoint
    sides = args.sides or list(mixed.SIDES if args.mixed else SIDES)
    for i, name in enumerate(chosen):
        passed = {row.side for row in rows if row.architecture == name and row.error is None}
        if not (left := [side for side in sides if side not in passed]):
            continue
        if time.perf_counter() - start > args.seconds:
            break
        found = _rows(name, known[name], left, args)
        rows = renewed(rows, found, left)
        for row in found:
            error = max(row.gradient_errors, default=float("nan"))
            said = f"{row.error or ''} {'; '.join(row.notes[:1])}"[:150]
            print(f"{i + 1}/{len(chosen)} {name:24} {row.side:9} {error:.1e} {row.promoted:3} {row.seconds:5.1f} s  {said}", flush=True)  # fmt: skip
        if args.resume or not args.only:
            machine.save(file, {"summary": summary(rows, known), "rows": [asdict(row) for row in rows]})
    verdicts = summary(rows, known)
    print(json.dumps(verdicts, indent=1))
    raise SystemExit(bool(verdicts["failed"]))


def _rows(name: str, architecture: Buildable, sides: list[str], args: argparse.Namespace) -> list[Row]:
    if args.mixed:
        return mixed.measure(name, architecture, sides, args.checkpoint)
    return run(name, architecture, sides, args.lowering)


def _kept(path: Path | None) -> list[Row]:
    return [] if path is None else [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]["rows"]]


def renewed(rows: list[Row], found: list[Row], sides: list[str]) -> list[Row]:
    """Return the rows with those that were found when an architecture ran again under ``sides``, which had not passed.

    Failed rows of these sides go, and a failed row of float32 or ``aot_eager``, which stands for all sides. Rows that passed
    stay, and so do the failed ones of other sides. A row of autocast comes with each run: the first stays.
    """
    name = found[0].architecture
    others = {*SIDES, *mixed.SIDES} - set(sides)
    stay = [row for row in rows if row.architecture != name or row.error is None or row.side in others]
    had = {row.side for row in stay if row.architecture == name}
    return stay + [row for row in found if row.side not in had]


if __name__ == "__main__":
    main()
