"""Make the console that commands print to: as wide as the terminal, or wide enough for a table in a file or a pipe."""

from __future__ import annotations

from rich.console import Console

PLAIN_WIDTH = 120  # characters


def console_for(*, stderr: bool = False) -> Console:
    """Return a console that does not cut tables where its output is no terminal.

    It prints on standard output, or on standard error where JSON goes to standard output.
    """
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH, stderr=stderr)
