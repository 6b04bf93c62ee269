"""Make the console that commands print to: as wide as the terminal, or 120 characters wide in a file or a pipe."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 120  # characters


def console_for(*, stderr: bool = False) -> Console:
    """Return a console that does not truncate tables when its output is not a terminal.

    ``stderr``: print to standard error, because JSON goes to standard output.
    """
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH, stderr=stderr)


def columns(left: tuple[str, ...], right: tuple[str, ...], **options: Any) -> Table:
    """Return an empty table: columns aligned to the left, then columns aligned to the right."""
    table = Table(*left, box=box.SIMPLE_HEAD, **{"title_justify": "left", "caption_justify": "left"} | options)
    for column in right:
        table.add_column(column, justify="right")
    return table
