"""Show progress while a graph is planned and compiled, and on a terminal a summary afterwards.

A terminal has one line that changes each second. Any other standard error gets a line after half a minute, and then
one each minute, because a log must not fill up.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from fxprec.passes.crossings.progress import Progress, is_wanted

log = logging.getLogger(__name__)
EVERY_S = 1.0
FIRST_LINE_S, EACH_LINE_S = 30.0, 60.0


class _Ticker(threading.Thread):
    """A thread that shows a message with the seconds since its start, as Inductor and compilers have no callbacks."""

    def __init__(self, message: str, *, has_own_line: bool) -> None:
        super().__init__(daemon=True, name="fxprec progress")
        self.message, self.has_own_line = message, has_own_line
        self._ended = threading.Event()

    def run(self) -> None:
        if sys.stderr.isatty():
            self._change_a_line()
        else:
            self._write_lines()

    def _change_a_line(self) -> None:
        line = Progress()
        while not self._ended.wait(EVERY_S):
            if not self.has_own_line:
                line.tick(self.message)
        line.end()

    def _write_lines(self) -> None:
        began, wait_s = time.monotonic(), FIRST_LINE_S
        while not self._ended.wait(wait_s):
            print(f"fxprec: {self.message}, {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)
            wait_s = EACH_LINE_S

    def end(self) -> None:
        self._ended.set()
        self.join()


_ticker: _Ticker | None = None


@contextmanager
def telling(message: str, *, has_own_line: bool = False) -> Iterator[None]:
    """Log ``message`` for the block inside the context, and show it if the block takes long.

    A nested block shows its own message while it runs. ``has_own_line``: the block shows a line of its own on a
    terminal.
    """
    global _ticker
    log.debug("%s", message)
    if _ticker is not None:
        outer, before = _ticker, (_ticker.message, _ticker.has_own_line)
        outer.message, outer.has_own_line = message, has_own_line
        try:
            yield
        finally:
            outer.message, outer.has_own_line = before
        return
    if not is_wanted():
        yield
        return
    _ticker = ticker = _Ticker(message, has_own_line=has_own_line)
    ticker.start()
    try:
        yield
    finally:
        _ticker = None
        ticker.end()


def say(message: str) -> None:
    """Write a line to standard error, terminal or not, on rank 0: what is to follow takes long."""
    if is_wanted():
        print(f"fxprec: {message}", file=sys.stderr, flush=True)


@cache
def announce(message: str) -> None:
    """Show a line on a terminal, once per process since equal layers repeat it, and only on rank 0."""
    if sys.stderr.isatty() and is_wanted():
        print(message, file=sys.stderr)
