"""Show progress on a terminal while a graph is planned and compiled, and a summary afterwards."""

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
    """A thread that shows a message with the seconds since its start, as Inductor and compilers have no callbacks."""

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
    """Log ``message`` for the block inside the context; on a terminal also show it if the block takes over a second.

    A nested block shows its own message while it runs. An empty message shows nothing, for code with its own line.
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
    """Show a line on a terminal, once per process since equal layers repeat it, and only on rank 0."""
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)
