"""What commands share of their output: JSON in the place of a table, and lines that say how far a command is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Annotated, Literal

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(data: object) -> None:
    """Print data as JSON: dataclasses by their fields, numbers that are not finite as text."""
    from fxprec.report.result import plain

    print(json.dumps(plain(data), indent=1, allow_nan=False))


def teller(*, as_json: bool) -> Callable[[str], None]:
    """Return what prints a line with the seconds since now: on standard error where JSON goes to standard output."""
    start, stream = time.perf_counter(), sys.stderr if as_json else sys.stdout

    def tell(line: str) -> None:
        print(f"[{time.perf_counter() - start:5.1f} s] {line}", flush=True, file=stream)

    return tell


def names(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated option."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def modules(text: str) -> tuple[str, ...] | Literal["ends"]:
    """Return what ``--keep-high`` asks for: patterns of module names, or both ends of the model."""
    return "ends" if text == "ends" else names(text)
