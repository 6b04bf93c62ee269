"""The rows of a result. The file is written after each row, so that a run that is ended keeps what it measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.yardsticks.cells import COLUMNS, LATE, LEFT_OUT, VERDICTS, Cell, Row


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


@dataclass
class Kept:
    """The rows measured so far. Without a ``name`` no file is written."""

    name: str | None
    rows: list[Row] = field(default_factory=list)
    path: Path | None = None

    @staticmethod
    def of(name: str | None, results: Iterable[Path]) -> Kept:
        """Return the rows of earlier ``results``, of each operator the last one. Late rows are left."""
        rows = {row.operator: row for path in results for row in read(path) if not row.late}
        return Kept(name, list(rows.values()))

    def has(self, operator: str) -> bool:
        return any(row.operator == operator for row in self.rows)

    def add(self, row: Row) -> None:
        """Add a row and write the file."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        if self.name is not None:
            rows = {"summary": summary(self.rows), "operators": [asdict(row) for row in self.rows]}
            self.path = machine.save(f"yardsticks-{self.name}", rows)


def read(path: Path) -> list[Row]:
    """Return the rows of a result."""
    return [_row(kept) for kept in json.loads(path.read_text(encoding="utf-8"))["rows"]["operators"]]


def _row(kept: dict[str, Any]) -> Row:
    return Row(**{**kept, "cells": {column: Cell(**cell) for column, cell in kept["cells"].items()}})
