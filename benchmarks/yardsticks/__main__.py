"""Public yardsticks: suites of tests that nobody here wrote, one row each.

    pip install expecttest                              # torch's own test suites need it
    python -m benchmarks.yardsticks                     # one table of what was measured, a row a suite
    python -m benchmarks.yardsticks op_db               # every operator of torch's op_db
    python -m benchmarks.yardsticks op_db --only tanh linalg.inv
    python -m benchmarks.yardsticks op_db --sample 40   # drawn by a fixed seed
    python -m benchmarks.yardsticks op_db --sample 25 --recipes inductor fp32 compiled --keep op_db-inductor   # 15 s each
    python -m benchmarks.yardsticks op_db --recipes mixed --keep op_db-mixed   # under autocast
    python -m benchmarks.yardsticks module_db           # every module of torch's module_db, by the same rules
    python -m benchmarks.yardsticks sensitivity         # writes fxprec/ir/operators/measured.json: 10 minutes

Whole models, and tests, of a checkout that is read where it lies:

    python -m benchmarks.yardsticks paritybench --checkout DIR --sample 300   # jansel/pytorch-jit-paritybench
    python -m benchmarks.yardsticks huggingface --checkout DIR                # pytorch/pytorch, benchmarks/dynamo
    python -m benchmarks.yardsticks timm --checkout DIR --sample 20
    python -m benchmarks.yardsticks torchbench --checkout DIR --torchbench DIR       # pytorch/benchmark
    python -m benchmarks.yardsticks tests --checkout DIR --file test/nn/test_pooling.py

Columns: plain torch in float32 (eager), `torch.autocast` in bfloat16, torch's own backends where they were run, fxprec's
recipes by the reference lowering, and fp8 through Inductor (compiled); each operator, model or test passed, failed, or is refused in words. What is left out has no gradient in plain torch,
or is wrong in torch's own backends. What a limit of ``--seconds`` ends is late. The criteria: `benchmarks/yardsticks/op_db.py`, `whole.py`, `pytorch_tests.py`. Exit code
1 where something failed.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.yardsticks import (
    conditioning,
    dynamo_models,
    exercise,
    module_db,
    op_db,
    paritybench,
    pytorch_tests,
    table,
    torchbench,
    whole,
)
from benchmarks.yardsticks.cells import (
    BY_THE_REFERENCE,
    COLUMNS,
    FAILED,
    LATE,
    LEFT_OUT,
    MIXED,
    OURS,
    TORCHS,
    VERDICTS,
    Row,
)

SUITES: dict[str, Callable[[], list[Any]]] = {"op_db": exercise.operators, "module_db": module_db.modules}
LISTS = ("huggingface", "timm", "torchbench")
READ_BY_PATH = ("paritybench", *LISTS, "tests")


def summary(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Return how many operators have each verdict, by column. A column without a cell is late where the row is."""
    found = {}
    for column in COLUMNS:
        verdicts = Counter(row.cells[column].verdict for row in rows if column in row.cells)
        verdicts[LEFT_OUT] += sum(bool(row.left_out) for row in rows)
        verdicts[LATE] += sum(bool(row.late) and column not in row.cells for row in rows)
        if any(column in row.cells for row in rows):
            found[column] = {verdict: verdicts[verdict] for verdict in VERDICTS}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", choices=[*SUITES, "sensitivity", *READ_BY_PATH])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these, as the suite names them")
    parser.add_argument("--sample", type=int, metavar="N", help="N of the suite, drawn by a fixed seed")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="inputs of each, of other shapes")
    parser.add_argument("--recipes", nargs="+", choices=[*TORCHS, *OURS], help="near, bf16, fp8; of tests, near")
    parser.add_argument("--keep", metavar="NAME", help="keep the result of a part of a suite under this name")
    parser.add_argument("--seconds", type=int, default=60, help="the time of one of the suite")
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="where the suite's files lie")
    parser.add_argument("--torchbench", type=Path, metavar="DIR", help="a checkout of pytorch/benchmark")
    parser.add_argument("--file", type=Path, metavar="PATH", help="a test file, relative to the checkout")
    args = parser.parse_args()
    if args.suite is None:
        print(table.text())
        return
    args.recipes = args.recipes or (["near"] if args.suite == "tests" else BY_THE_REFERENCE)
    logging.disable(logging.CRITICAL)  # Dynamo tells of every graph break
    torch.set_num_threads(1)
    if args.suite in READ_BY_PATH:
        _judge_by_path(parser, args)
        return
    try:
        operators = op_db.chosen(SUITES.get(args.suite, exercise.operators)(), args.only, args.sample)
    except LookupError as error:
        parser.error(str(error))
    is_whole = not args.only and args.sample is None
    if args.suite == "sensitivity":
        _measure(operators, args.seconds, is_whole)
    else:
        _judge(operators, args, is_whole)


def _judge(operators: list[Any], args: argparse.Namespace, is_whole: bool) -> None:
    rows = []
    print(f"{'operator':44} {' '.join(f'{name:>8}' for name in COLUMNS)}")
    with _progress(args.suite, len(operators)) as tick:
        for row in op_db.rows(operators, args.samples, args.recipes, args.seconds):
            rows.append(row)
            print(op_db.text_of(row), flush=True)
            tick(row.operator)
    found = summary(rows)
    for column, verdicts in found.items():
        print(f"{column:9}", "  ".join(f"{verdict} {count}" for verdict, count in verdicts.items()))
    if is_whole or args.keep:
        _save(args.keep or args.suite, found, rows)
    raise SystemExit(any(verdicts[FAILED] for name, verdicts in found.items() if name in OURS))


def _judge_by_path(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.checkout is None or (args.suite == "tests" and args.file is None):
        parser.error(f"{args.suite} is read by path: give --checkout{', and --file' * (args.suite == 'tests')}")
    if MIXED in args.recipes:
        parser.error(f"column {MIXED} is of operators and modules")
    if args.suite == "tests" and (beyond := [name for name in args.recipes if name not in pytorch_tests.COLUMNS]):
        parser.error(f"{', '.join(beyond)}: the tests' tolerance has {', '.join(pytorch_tests.COLUMNS)}")
    if args.suite == "torchbench" and args.torchbench is None:
        parser.error("torchbench's own models are read by path: give --torchbench")
    try:
        rows = list(_rows_by_path(args))
    except FileNotFoundError as error:
        parser.error(str(error))
    found = summary(rows)
    for column, verdicts in found.items():
        print(f"{column:9}", "  ".join(f"{verdict} {count}" for verdict, count in verdicts.items()))
    if args.keep or not args.only:
        _save(args.keep or (f"tests-{args.file.stem}" if args.suite == "tests" else args.suite), found, rows)
    raise SystemExit(any(verdicts[FAILED] for name, verdicts in found.items() if name in OURS))


def _rows_by_path(args: argparse.Namespace) -> Iterator[Row]:
    if args.suite == "tests":
        path = args.checkout / args.file
        yield from map(_told, pytorch_tests.rows(path, args.only, args.sample, args.recipes, args.seconds))
        return
    models = _models(args)
    chosen = [model for model in models if not args.only or model.name in args.only]
    yield from map(_told, whole.Suite(chosen, args.sample or len(chosen), tuple(args.recipes), args.seconds).rows())


def _models(args: argparse.Namespace) -> list[whole.Model]:
    if args.suite == "paritybench":
        return paritybench.models(args.checkout)
    if args.suite == "torchbench":
        return torchbench.models(args.checkout, args.torchbench)
    return dynamo_models.models(args.checkout, args.suite)


def _save(name: str, found: dict[str, dict[str, int]], rows: list[Row]) -> None:
    print(machine.save(f"yardsticks-{name}", {"summary": found, "operators": [asdict(row) for row in rows]}))


def _told(row: Row) -> Row:
    print(op_db.text_of(row), flush=True)
    return row


def _measure(operators: list[Any], seconds: int, is_whole: bool) -> None:
    with _progress("sensitivity", len(operators)) as tick:

        def tell(name: str, failed: str) -> None:
            tick(name)
            if failed:
                print(f"{name:44} not measured: {failed}", flush=True)

        found = conditioning.measured(operators, seconds, tell)
    for name, row in found.table().items():
        for role in ("operands", "result"):
            if role in row:
                print(f"{name:36} {role:8}", "  ".join(f"{key} {value}" for key, value in row[role].items()))
    if is_whole:
        print(conditioning.write(found))


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar in a terminal; yield what moves it on, given what was done."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(name, total=total)
        yield lambda done: progress.update(bar, advance=1, description=done[:40])


if __name__ == "__main__":
    main()
