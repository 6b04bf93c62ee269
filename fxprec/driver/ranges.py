"""Ranges for ``torch.profiler``: one for each half of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import record_function

from fxprec import compat

Compiled = Callable[..., Any]


def ranged(run: Compiled, name: str) -> Compiled:
    """Return ``run`` in a range of that name while a profiler is on; else it is called as it is."""

    def call(args: list[Any]) -> Any:
        if not compat.is_profiling():
            return run(args)
        with record_function(name):
            return run(args)

    return compat.boxed(call)


def range_name(graph: str, half: str) -> str:
    """Return what ``torch.profiler`` shows of a half."""
    return f"fxprec {graph} {half}"
