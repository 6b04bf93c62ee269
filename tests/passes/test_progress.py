"""The line that says what planning is at: on a terminal, after some seconds, and gone at the end."""

from __future__ import annotations

import io

import pytest

from fxprec.passes.crossings.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("quiet_s", "stream", "shown"), [(-1.0, Terminal, True), (1e9, Terminal, False), (-1.0, io.StringIO, False)]
)
def test_it_is_shown_on_a_terminal_where_planning_takes_long(monkeypatch, quiet_s, stream, shown) -> None:
    err = stream()
    monkeypatch.setattr("sys.stderr", err)
    progress = Progress(quiet_s)
    progress.show("planning what is kept for backward: search 3, 7 nodes")
    assert ("fxprec: planning what is kept for backward: search 3, 7 nodes, 0 s" in err.getvalue()) == shown
    progress.end()
    assert err.getvalue().endswith("\r\x1b[K") == shown
