"""``fxprec demo``: train every model in every recipe, show the table, write plans and a log."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fxprec import compat
from fxprec.demo.table import result_table, score_text
from fxprec.demo.tasks import TASKS, Task
from fxprec.demo.train import Outcome, train
from fxprec.errors import ConfigError, LoweringError, did_you_mean, writing

RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {"recipe": "fp32"},
    "bf16": {"recipe": "bf16"},
    "fp8": {"recipe": "fp8"},
    "hfp8": {"recipe": "hfp8", "storage": "packed"},
}
"""Recipes by the name that is shown, each with its ``options=`` for ``torch.compile``."""

QUICK_RECIPES = ("fp32", "fp8")
QUICK_STEPS = 60
LOG_EVERY = 10  # steps


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of a demo run. Empty ``recipes`` or ``only`` mean all (``quick``: `QUICK_RECIPES`)."""

    out: Path
    seed: int = 0
    quick: bool = False
    recipes: Sequence[str] = ()
    only: str = ""
    threads: int = 1
    """Threads. Networks this small gain nothing from a second thread, and lose much on a machine that others use."""

    def chosen_recipes(self) -> dict[str, dict[str, Any]]:
        """Return the recipes to run. Raises `ConfigError` for an unknown one."""
        names = self.recipes or (QUICK_RECIPES if self.quick else tuple(RECIPES))
        for name in names:
            _check("--recipes", name, RECIPES)
        return {name: RECIPES[name] for name in names}

    def chosen_tasks(self) -> list[Task]:
        """Load the data of the tasks to run. Raises `ConfigError` for an unknown one."""
        if self.only:
            _check("--only", self.only, TASKS)
        sizes = {"steps": QUICK_STEPS} if self.quick else {}
        return [make(**sizes) for name, make in TASKS.items() if self.only in ("", name)]


def run_demo(options: DemoOptions, console: Console) -> list[Outcome]:
    """Train, show and write. Return the outcomes in the table's order. Raises `FxprecError`, one line each."""
    recipes = options.chosen_recipes()
    if options.threads < 1:
        raise ConfigError(f"--threads is {options.threads}; give at least 1")
    if compat.cxx_compiler() is None:  # before anything is loaded or written
        raise LoweringError(compat.NO_CXX_COMPILER)
    tasks = options.chosen_tasks()
    outcomes = []
    with _threads(options.threads), _open_log(options.out) as log, _progress(console) as progress:
        show = Show(log, progress)
        for task in tasks:
            for recipe, settings in recipes.items():
                show.start(task, recipe, options=settings, seed=options.seed)
                outcome = train(task, recipe, settings, seed=options.seed, on_step=show.step)
                show.finish(outcome)
                _save_plans(outcome, options.out)
                outcomes.append(outcome)
    console.print(result_table(outcomes))
    console.print(f"Plans and log are in {options.out}{os.sep}", soft_wrap=True)
    return outcomes


class Show:
    """The display while training, and the log, whose lines are JSON: ``{"kind": "step", "model": "digits", ...}``."""

    def __init__(self, log: IO[str], progress: Progress) -> None:
        self._log, self._progress = log, progress
        self._told: set[str] = set()

    def start(self, task: Task, recipe: str, **settings: object) -> None:
        """Show that training of a task with a recipe begins."""
        self._task, self._recipe = task, recipe
        self._bar = self._progress.add_task(f"{task.name:6} {recipe:5}", total=task.steps, note="compiling")
        self._write("start", **settings, torch=torch.__version__)

    def step(self, step: int, loss: float) -> None:
        """Show a step's loss; log every ``LOG_EVERY``-th."""
        self._progress.update(self._bar, completed=step, note=f"loss {loss:.3f}")
        if step % LOG_EVERY == 0 or step in (1, self._task.steps):
            self._write("step", step=step, loss=loss)

    def finish(self, outcome: Outcome) -> None:
        """Print one line per run. A warning is shown once, but logged for each run."""
        self._progress.remove_task(self._bar)
        for event in outcome.events:
            self._write("event", event=asdict(event))
        self._write("result", **result_of(outcome))
        for notice in outcome.notices:
            if notice not in self._told:
                self._progress.console.print(f"note: {notice}", markup=False, soft_wrap=True)
        self._told.update(outcome.notices)
        self._progress.console.print(
            f"{outcome.task:6} {outcome.recipe:5} {score_text(outcome)}, saved {outcome.saved_bytes / 1e6:.2f} MB, "
            f"compiled in {outcome.compile_seconds:.1f} s, {outcome.steps} steps in {outcome.train_seconds:.1f} s"
        )

    def _write(self, kind: str, **values: object) -> None:
        line = {"kind": kind, "model": self._task.name, "recipe": self._recipe} | values
        self._log.write(json.dumps(line, default=str) + "\n")
        self._log.flush()


def result_of(outcome: Outcome) -> dict[str, Any]:
    """Return the result of one run as plain data."""
    names = ("metric", "score", "saved_bytes", "promotions", "compile_seconds", "train_seconds", "notices")
    ratios = {f"{which}_low_ratio": outcome.low_ratio(which) for which in ("requested", "achieved")}
    return {name: getattr(outcome, name) for name in names} | ratios


def _save_plans(outcome: Outcome, out: Path) -> None:
    for i, plan in enumerate(outcome.plans):
        suffix = f"-{i}" if len(outcome.plans) > 1 else ""
        plan.save(out / f"{outcome.task}-{outcome.recipe}{suffix}.plan.json")


def _open_log(out: Path) -> IO[str]:
    """Create the folder and open the log in it. Raises `ConfigError` if it cannot be written."""
    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        return (out / "log.jsonl").open("w", encoding="utf-8")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _progress(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _check(option: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise ConfigError(f"{option}: unknown {name!r}{did_you_mean(name, known)}; allowed: {', '.join(known)}")
