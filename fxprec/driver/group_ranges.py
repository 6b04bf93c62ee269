"""Ranges for ``torch.profiler``, one for each group, in the eager lowering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.profiler import record_function

from fxprec import compat
from fxprec.passes.analysis.tensors import GROUP_META

Compiled = Callable[..., Any]


def interpreted_by_group(gm: GraphModule, run: Compiled) -> Compiled:
    """Return ``run``, but while a profiler is on ``gm`` node by node, in ranges ``fxprec group N``."""

    def call(args: list[Any]) -> Any:
        if not compat.is_profiling():
            return run(args)
        taken = list(args)
        args.clear()
        with torch.no_grad():
            return _ByGroup(gm).run_ranged(taken)

    return compat.boxed(call)


class _ByGroup(Interpreter):
    """Opens a range where the group changes; a node of no group stays in that of the node before it."""

    group: int | None = None
    range: record_function | None = None

    def run_ranged(self, args: list[Any]) -> Any:
        try:
            return self.run(*args)
        finally:
            self._enter(None)

    def run_node(self, n: Node) -> Any:
        group = n.meta.get(GROUP_META)
        if group is not None and group != self.group:
            self._enter(group)
        return super().run_node(n)

    def _enter(self, group: int | None) -> None:
        if self.range is not None:
            self.range.__exit__(None, None, None)
        self.group = group
        self.range = None if group is None else record_function(f"fxprec group {group}")
        if self.range is not None:
            self.range.__enter__()
