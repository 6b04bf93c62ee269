"""The rows of a result. The file is written after each row, so that a run that is ended keeps what it measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
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
    note: str = ""

    @staticmethod
    def of(name: str | None, results: Iterable[Path]) -> Kept:
        """Return the rows of earlier ``results``, each operator's cells joined. Late rows without a cell are left."""
        kept = Kept(name)
        for path in results:
            kept.note = " ".join(filter(None, (kept.note, _rows_of(path).get("note", ""))))
            for row in read(path):
                kept._join(row)
        kept.rows = [row for row in kept.rows if row.cells or not row.late]
        return kept

    def has(self, operator: str, columns: Iterable[str]) -> bool:
        """Return whether the operator is left out, or has a cell in each of these columns."""
        found = (row for row in self.rows if row.operator == operator)
        return any(bool(row.left_out) or row.cells.keys() >= set(columns) for row in found)

    def add(self, row: Row) -> None:
        """Add a row, or its cells to those that the operator has; write the file."""
        self._join(row)
        self.write()

    def _join(self, row: Row) -> None:
        for place, old in enumerate(self.rows):
            if old.operator == row.operator and not row.left_out:
                self.rows[place] = replace(row, samples=row.samples or old.samples, cells={**old.cells, **row.cells})
                return
        self.rows = [*(old for old in self.rows if old.operator != row.operator), row]

    def write(self) -> None:
        if self.name is not None:
            note = {"note": self.note} if self.note else {}
            rows = {"summary": summary(self.rows), **note, "operators": [asdict(row) for row in self.rows]}
            self.path = machine.save(f"yardsticks-{self.name}", rows)


def read(path: Path) -> list[Row]:
    """Return the rows of a result."""
    return [_row(kept) for kept in _rows_of(path)["operators"]]


def _rows_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return found


def _row(kept: dict[str, Any]) -> Row:
    return Row(**{**kept, "cells": {column: Cell(**cell) for column, cell in kept["cells"].items()}})
