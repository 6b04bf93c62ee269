"""Where commands print: as wide as the terminal, or wide enough for a table in a file or a pipe."""

from __future__ import annotations

from rich.console import Console

PLAIN_WIDTH = 120  # characters


def console_for() -> Console:
    """Return a console on standard output that does not cut tables where the output is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)
