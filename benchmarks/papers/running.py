"""Tables one after another with a bar for each row, or several at once in processes of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.papers import catalog, store
from benchmarks.papers.store import Result


@dataclass(frozen=True)
class Job:
    """One table to measure: seeds 0 to ``seeds`` - 1 that were not kept, all of them if ``is_new``."""

    name: str
    seeds: int
    is_full: bool
    is_new: bool


def results(jobs: Sequence[Job], processes: int, console: Console) -> Iterator[Result]:
    """Each table's result as it is there: in order in one process, as they end in several."""
    with _progress(console) as progress:
        whole = progress.add_task("tables", total=len(jobs), note="")
        for result in _parallel(jobs, processes) if processes > 1 else _serial(jobs, progress):
            progress.advance(whole)
            yield result


def _serial(jobs: Sequence[Job], progress: Progress) -> Iterator[Result]:
    for job in jobs:
        bar = progress.add_task(job.name, total=None, note="")
        yield _run(job, _ticks(job, bar, progress))
        progress.remove_task(bar)


def _ticks(job: Job, bar: int, progress: Progress) -> Callable[[int, str], None]:
    """Advance the bar by a row; how many rows there are is known once a seed is through."""
    rows: dict[int, int] = {}

    def tick(seed: int, row: str) -> None:
        rows[seed] = rows.get(seed, 0) + 1
        total = max(rows.values()) * (job.seeds - min(rows)) if len(rows) > 1 else None
        progress.update(bar, advance=1, total=total, note=f"seed {seed + 1}/{job.seeds}: {row}")

    return tick


def _parallel(jobs: Sequence[Job], processes: int) -> Iterator[Result]:
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for done in as_completed([pool.submit(_run, job) for job in jobs]):
            yield done.result()


def _run(job: Job, on_row: Callable[[int, str], object] = lambda seed, row: None) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rounding to nearest is meant to be stuck
        return store.measure(job.name, catalog.load(job.name), job.seeds, job.is_full, on_row, job.is_new)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description:22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress
