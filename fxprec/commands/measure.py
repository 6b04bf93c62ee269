"""``fxprec measure``: memory and time of a model's training step, beside Inductor's and autocast's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxprec.commands.output import MAX_SEED, AsJson, given, names, print_json, teller
from fxprec.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

STEPS = 5


def measure(
    target: Annotated[
        str,
        typer.Argument(help="path/file.py:factory or module:callable; returns (model, batch) or (model, batch, loss)."),
    ],
    sides: Annotated[
        str, typer.Option(help="Any of inductor, autocast and fxprec's recipes. Default: inductor,autocast,bf16,fp8.")
    ] = "",
    peak_budget: Annotated[str, typer.Option(help="peak_budget of fxprec's sides, for instance 60%.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = STEPS,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of weights and batch.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a few steps of a model compiled by Inductor, under bf16 autocast, and by fxprec; print memory and time.

    Each side runs in a process of its own. The batch is the same in every step, and no optimizer runs.
    """
    from fxprec.diagnosis.measured import SIDES, check_side
    from fxprec.report.target import find_factory

    asked, options = names(sides) or SIDES, given(peak_budget=peak_budget)
    find_factory(target)  # what is asked for wrongly is told before any process starts
    ours = [side for side in asked if check_side(side, options) is not None]
    if peak_budget and not ours:
        raise ConfigError("--peak-budget is for fxprec's sides, and --sides names none; add one, such as fp8")
    tell, rows, failed = teller(as_json=as_json), list[dict[str, Any]](), dict[str, str]()
    for side in asked:
        if len(asked) == 1 and as_json:  # as a process of the other case runs it
            rows.append(_measured(target, side, options, steps, seed))
            continue
        tell(f"{side}: compile, then {steps} steps")
        budget = ["--peak-budget", peak_budget] if peak_budget and side in ours else []
        try:
            rows.append(_in_a_process(target, side, [*budget, "--steps", str(steps), "--seed", str(seed)]))
        except ConfigError as error:
            if not budget or len(asked) == 1:
                raise
            failed[side] = str(error)  # a budget may be out of one side's reach and not of another's
            tell(str(error))
    if as_json:
        print_json({"target": target, "rows": rows, "failed": failed})
    elif rows:
        _show(target, rows)
    if failed:
        raise ConfigError(f"not measured: {', '.join(failed)}, as said above; the other sides were")


def _measured(target: str, side: str, options: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    import torch

    from fxprec.diagnosis.measured import measure as measure_side
    from fxprec.diagnosis.subject import Subject
    from fxprec.report.result import plain
    from fxprec.report.target import called, find_factory, model_and_batch

    torch.manual_seed(seed)
    model, batch, loss = model_and_batch(called(find_factory(target), target), target)
    row: dict[str, Any] = plain(measure_side(Subject.of(model, batch, loss), side, options, steps))
    return row


def _in_a_process(target: str, side: str, options: Sequence[str]) -> dict[str, Any]:
    """Return a side's row. Raises `ConfigError` with the last line of a process that failed."""
    command = [sys.executable, "-m", "fxprec", "measure", target, "--sides", side, *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1].removeprefix("fxprec: error: ")
        raise ConfigError(f"{side}: {last}")
    (row,) = json.loads(done.stdout)["rows"]
    found: dict[str, Any] = row
    return found


def _show(target: str, rows: Sequence[dict[str, Any]]) -> None:
    from fxprec.console import console_for

    rival = next((row for row in rows if row["side"] == "autocast"), rows[0])
    console_for().print(_table(target, rows, rival))


def _table(target: str, rows: Sequence[dict[str, Any]], rival: dict[str, Any]) -> Table:
    from fxprec.console import columns

    right = ("peak, MB", "share", "step, ms", "share", "first step, s", "saved, MB", "loss", "gradient norm")
    caption = (
        "Peak: bytes live at once that a step allocates, parameter gradients included. Shares are of "
        f"{rival['side']}'s. Loss and gradient norm are of the first step."
    )
    table = columns(("",), right, title=target, caption=caption)
    share: Callable[[dict[str, Any], str], str] = lambda row, of: f"{row[of] / rival[of]:.2f}"  # noqa: E731
    for row in rows:
        saved = "" if row["saved_bytes"] is None else f"{row['saved_bytes'] / 1e6:.1f}"
        table.add_row(
            row["side"],
            f"{row['peak_bytes'] / 1e6:.1f}",
            share(row, "peak_bytes"),
            f"{1e3 * row['step_s']:.1f}",
            share(row, "step_s"),
            f"{row['first_s']:.1f}",
            saved,
            *(f"{float(row[number]):.5g}" for number in ("loss", "gradient_norm")),
        )
    return table
