"""Print the output of commands: JSON instead of a table, and progress lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any, Literal, TextIO

import typer

MAX_SEED = 2**63 - 1
_json_to: list[TextIO] = []  # standard output, while a command runs that prints JSON


@contextmanager
def _json_alone() -> Iterator[None]:
    _json_to.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _json_to.pop()


def _alone_if_asked(context: typer.Context, asked: bool) -> bool:
    """Send what the user's code prints to standard error, so that JSON alone is on standard output."""
    if asked:
        context.with_resource(_json_alone())
    return asked


AsJson = Annotated[bool, typer.Option("--json", callback=_alone_if_asked, help="Print JSON.")]


def print_json(data: object) -> None:
    """Print data as JSON: dataclasses as objects, non-finite numbers as text."""
    from fxprec.report.result import plain

    print(json.dumps(plain(data), indent=1, allow_nan=False), file=_json_to[-1] if _json_to else None)


def teller(*, as_json: bool) -> Callable[[str], None]:
    """Return a function that prints a line with the seconds since this call, on standard error if ``as_json``."""
    start, stream = time.perf_counter(), sys.stderr if as_json else sys.stdout

    def tell(line: str) -> None:
        print(f"[{time.perf_counter() - start:5.1f} s] {line}", flush=True, file=stream)

    return tell


def given(**options: object) -> dict[str, Any]:
    """Return the options that were given: neither None nor ""."""
    return {name: value for name, value in options.items() if value not in (None, "")}


def names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated option."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def modules(text: str) -> tuple[str, ...] | Literal["ends"]:
    """Return the value of ``--keep-high``: patterns of module names, or "ends"."""
    return "ends" if text == "ends" else names(text)
