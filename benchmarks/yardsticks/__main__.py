"""Public yardsticks: suites of tests that nobody here wrote, one row each.

    pip install expecttest                              # torch's own test suites need it
    python -m benchmarks.yardsticks                     # one table of what was measured, a row a suite
    python -m benchmarks.yardsticks op_db               # every operator of torch's op_db
    python -m benchmarks.yardsticks op_db --only tanh linalg.inv
    python -m benchmarks.yardsticks op_db --sample 40   # drawn by a fixed seed
    python -m benchmarks.yardsticks op_db --recipes plain compiled --keep op_db-inductor   # fp8 through Inductor: 5 s each
    python -m benchmarks.yardsticks op_db --recipes mixed --keep op_db-mixed   # under autocast
    python -m benchmarks.yardsticks op_db --resume FILE FILE --keep NAME       # measures what these results lack
    python -m benchmarks.yardsticks module_db           # every module of torch's module_db, by the same rules
    python -m benchmarks.yardsticks sensitivity         # writes fxprec/ir/operators/measured.json: 10 minutes

Whole models, and tests, of a checkout that is read where it lies:

    python -m benchmarks.yardsticks paritybench --checkout DIR --sample 300   # jansel/pytorch-jit-paritybench
    python -m benchmarks.yardsticks huggingface --checkout DIR                # pytorch/pytorch, benchmarks/dynamo
    python -m benchmarks.yardsticks timm --checkout DIR --sample 20
    python -m benchmarks.yardsticks torchbench --checkout DIR --torchbench DIR       # pytorch/benchmark
    python -m benchmarks.yardsticks tests --checkout DIR --file test/nn/test_pooling.py

Columns: plain torch in float32 (eager), `torch.autocast` in bfloat16, torch's own backends where they were run, fxprec's
recipes by the reference lowering (fp32 as plain), and fp32 and fp8 through Inductor (fp32, compiled); each operator, model or test passed, failed, or is refused in words. What is left out has no gradient in plain torch,
or is wrong in torch's own backends. A result is written after each row. What a limit of ``--seconds`` ends is late. The criteria: `benchmarks/yardsticks/op_db.py`, `whole.py`, `pytorch_tests.py`. Exit code
1 where something failed.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
from benchmarks.yardsticks.cells import BY_THE_REFERENCE, COLUMNS, FAILED, MIXED, OURS, TORCHS, Row
from benchmarks.yardsticks.kept import Kept, summary

SUITES: dict[str, Callable[[], list[Any]]] = {"op_db": exercise.operators, "module_db": module_db.modules}
LISTS = ("huggingface", "timm", "torchbench")
READ_BY_PATH = ("paritybench", *LISTS, "tests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", choices=[*SUITES, "sensitivity", *READ_BY_PATH])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these, as the suite names them")
    parser.add_argument("--sample", type=int, metavar="N", help="N of the suite, drawn by a fixed seed")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="inputs of each, of other shapes")
    parser.add_argument("--recipes", nargs="+", choices=[*TORCHS, *OURS], help="near, bf16, fp8; of tests, near")
    parser.add_argument("--keep", metavar="NAME", help="keep the result of a part of a suite under this name")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], metavar="FILE", help="keep these results' cells")
    parser.add_argument("--seconds", type=int, default=60, help="the time of one of the suite")
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="where the suite's files lie")
    parser.add_argument("--torchbench", type=Path, metavar="DIR", help="a checkout of pytorch/benchmark")
    parser.add_argument("--file", type=Path, metavar="PATH", help="a test file, relative to the checkout")
    args = parser.parse_args()
    if args.suite is None:
        print(table.text())
        return
    args.recipes = args.recipes or (["near"] if args.suite == "tests" else BY_THE_REFERENCE)
    with _alone():
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


@contextmanager
def _alone() -> Iterator[None]:
    """Run on one thread, without what Dynamo logs of each graph break."""
    threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logging.disable(disabled)


def _judge(operators: list[Any], args: argparse.Namespace, is_whole: bool) -> None:
    kept = Kept.of(args.keep or (args.suite if is_whole else None), args.resume)
    left = [op for op in operators if not kept.has(exercise.name_of(op), args.recipes)]
    print(f"{'operator':44} {' '.join(f'{name:>8}' for name in COLUMNS)}")
    with _progress(args.suite, len(left)) as tick:
        for row in op_db.rows(left, args.samples, args.recipes, args.seconds):
            kept.add(row)
            print(op_db.text_of(row), flush=True)
            tick(row.operator)
    _end(kept)


def _end(kept: Kept) -> NoReturn:
    """Write the rows, print their summary; exit with 1 where something failed."""
    kept.write()
    found = summary(kept.rows)
    for column, verdicts in found.items():
        print(f"{column:9}", "  ".join(f"{verdict} {count}" for verdict, count in verdicts.items()))
    if kept.path is not None:
        print(kept.path)
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
    own = f"tests-{args.file.stem}" if args.suite == "tests" else args.suite
    kept = Kept.of(args.keep or (None if args.only else own), args.resume)
    try:
        for row in _rows_by_path(args, kept):
            kept.add(row)
            print(op_db.text_of(row), flush=True)
    except FileNotFoundError as error:
        parser.error(str(error))
    _end(kept)


def _rows_by_path(args: argparse.Namespace, kept: Kept) -> Iterator[Row]:
    """Yield a row of each model or test that ``kept`` lacks."""
    if args.suite == "tests":
        tests = pytorch_tests.chosen(args.checkout / args.file, args.only, args.sample)
        left = [test for test in tests if not kept.has(test.id(), args.recipes)]
        yield from pytorch_tests.rows(left, args.recipes, args.seconds)
        return
    models = [model for model in _models(args) if not args.only or model.name in args.only]
    left = [model for model in models if not kept.has(model.name, args.recipes)]
    whole_rows = [row for row in kept.rows if row.samples and kept.has(row.operator, args.recipes)]
    wanted = len(left) if args.sample is None else args.sample - len(whole_rows)
    yield from whole.Suite(left, wanted, tuple(args.recipes), args.seconds).rows()


def _models(args: argparse.Namespace) -> list[whole.Model]:
    if args.suite == "paritybench":
        return paritybench.models(args.checkout)
    if args.suite == "torchbench":
        return torchbench.models(args.checkout, args.torchbench)
    return dynamo_models.models(args.checkout, args.suite)


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
