"""Make the console that commands print to: as wide as the terminal, or 120 characters wide in a file or a pipe."""

from __future__ import annotations

from rich.console import Console

PLAIN_WIDTH = 120  # characters


def console_for(*, stderr: bool = False) -> Console:
    """Return a console that does not truncate tables when its output is not a terminal.

    ``stderr``: print to standard error, because JSON goes to standard output.
    """
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH, stderr=stderr)
