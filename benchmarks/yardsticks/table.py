"""One table of all suites: the newest result of each, a column a backend or recipe."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import machine
from benchmarks.yardsticks.cells import COLUMNS, LATE, VERDICTS


def text(read: dict[str, Any] | None = None) -> str:
    """Return the table: passed / failed / refused / left out, and late where any is."""
    lines = [" ".join(("suite".ljust(34), *(column.rjust(15) for column in COLUMNS)))]
    for suite, result in sorted((newest() if read is None else read).items()):
        cells = (_cell(result["rows"]["summary"].get(column)) for column in COLUMNS)
        lines.append(" ".join((suite.ljust(34), *(cell.rjust(15) for cell in cells))))
    return "\n".join([*lines, "passed / failed / refused in words / left out / out of time, where any is"])


def newest() -> dict[str, Any]:
    """Return the newest result of each suite: files begin with their date."""
    paths = sorted(machine.RESULTS.glob("*-yardsticks-*.json"))
    return {path.stem.partition("-yardsticks-")[2]: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def _cell(verdicts: dict[str, int] | None) -> str:
    if verdicts is None:
        return "-"
    return " / ".join(str(verdicts.get(name, 0)) for name in VERDICTS if name != LATE or verdicts.get(LATE))
