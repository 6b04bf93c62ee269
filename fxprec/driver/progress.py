"""What a person at a terminal sees while a graph is planned and compiled, and once it is."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from fxprec.passes.crossings.progress import Progress

log = logging.getLogger(__name__)
EVERY_S = 1.0


class _Ticker(threading.Thread):
    """Shows a message with the seconds since it began: Inductor and the C++ compiler call nobody back meanwhile."""

    def __init__(self, message: str) -> None:
        super().__init__(daemon=True, name="fxprec progress")
        self.message = message
        self._line, self._ended = Progress(), threading.Event()

    def run(self) -> None:
        while not self._ended.wait(EVERY_S):
            if self.message:
                self._line.tick(self.message)
        self._line.end()

    def end(self) -> None:
        self._ended.set()
        self.join()


_ticker: _Ticker | None = None


@contextmanager
def telling(message: str) -> Iterator[None]:
    """Log what happens inside the block; on a terminal show it too, with the seconds, once it takes some.

    A block inside another one shows its own message meanwhile; an empty one leaves the line to another.
    """
    global _ticker
    log.debug("%s", message)
    if _ticker is not None:
        outer, before = _ticker, _ticker.message
        outer.message = message
        try:
            yield
        finally:
            outer.message = before
        return
    if not sys.stderr.isatty():
        yield
        return
    _ticker = ticker = _Ticker(message)
    ticker.start()
    try:
        yield
    finally:
        _ticker = None
        ticker.end()


@cache
def announce(message: str) -> None:
    """Show a line on a terminal, once in a process: equal layers say the same; of several ranks the first says it."""
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)
