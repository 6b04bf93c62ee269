"""Results as JSON, one file a table, written after every seed (every part of one, in tables that have parts), so that a run that was cut off goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import machine
from benchmarks.papers.found import Found

FOLDER = machine.RESULTS / "papers"


@dataclass
class Result:
    """What was measured of one table, by seed."""

    name: str
    is_full: bool = False
    seeds: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    """Processor time of each seed."""
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def found(self) -> Found:
        """The figures, seeds in order."""
        return Found(dict(sorted(self.seeds.items())))

    def save(self) -> Path:
        """Write the file; a text of the same bytes for the same figures."""
        path = path_of(self.name, self.is_full)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(vars(self), indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
        return path


def path_of(name: str, is_full: bool) -> Path:
    return FOLDER / f"{name}{'.full' if is_full else ''}.json"


def load(name: str, is_full: bool) -> Result | None:
    """What was kept of a table; None for nothing."""
    path = path_of(name, is_full)
    if not path.exists():
        return None
    kept = Result(**json.loads(path.read_text(encoding="utf-8")))
    kept.seeds = {int(seed): rows for seed, rows in kept.seeds.items()}
    kept.seconds = {int(seed): time for seed, time in kept.seconds.items()}
    return kept


def best(name: str) -> Result | None:
    """The full run where there is one."""
    return load(name, True) or load(name, False)


def measure(
    name: str, table: ModuleType, seeds: int, is_full: bool, on_row: Callable[[int, str], object], is_new: bool
) -> Result:
    """Run the seeds, of a table in parts the parts, that are missing, all of them if ``is_new``.

    ``on_row`` hears of each row.
    """
    kept = None if is_new else load(name, is_full)
    result = kept or Result(name, is_full)
    parts: Sequence[str | None] = table.parts(is_full) if hasattr(table, "parts") else (None,)
    for seed, part in product(range(seeds), parts):
        rows = result.seeds.get(seed, {})
        if rows if part is None else any(row == part or row.startswith(f"{part},") for row in rows):
            continue
        start, found = time.process_time(), {}
        for row, cells in table.run(seed, is_full) if part is None else table.run(seed, is_full, part):
            found[row] = dict(cells)
            on_row(seed, row)
        result.seeds[seed] = rows | found
        result.seconds[seed] = round(result.seconds.get(seed, 0.0) + time.process_time() - start, 2)
        result.machine = machine.describe()
        result.save()
    return result
