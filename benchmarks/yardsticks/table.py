"""One table of all suites: the newest result of each, a column a backend or recipe."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import machine
from benchmarks.yardsticks.op_db import COLUMNS, FAILED, LEFT_OUT, PASSED, REFUSED


def text(read: dict[str, Any] | None = None) -> str:
    """Return the table: passed / failed / refused / left out."""
    lines = [" ".join(("suite".ljust(34), *(column.rjust(15) for column in COLUMNS)))]
    for suite, result in sorted((newest() if read is None else read).items()):
        cells = (_cell(result["rows"]["summary"].get(column)) for column in COLUMNS)
        lines.append(" ".join((suite.ljust(34), *(cell.rjust(15) for cell in cells))))
    return "\n".join([*lines, "passed / failed / refused in words / left out"])


def newest() -> dict[str, Any]:
    """Return the newest result of each suite: files begin with their date."""
    paths = sorted(machine.RESULTS.glob("*-yardsticks-*.json"))
    return {path.stem.partition("-yardsticks-")[2]: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def _cell(verdicts: dict[str, int] | None) -> str:
    return "-" if verdicts is None else " / ".join(str(verdicts[name]) for name in (PASSED, FAILED, REFUSED, LEFT_OUT))
