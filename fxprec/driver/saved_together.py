"""Warn if the graphs of one step save more than ``activation_budget`` together, which bounds each graph by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxprec import compat
from fxprec.config import Settings
from fxprec.driver.shared_peak import first_compiled
from fxprec.passes.notice import readable

if TYPE_CHECKING:
    from fxprec.driver.graph import PlannedGraph


@dataclass(eq=False)
class _Call:
    layers: Hashable
    """The parameters of the graph: graphs for several batch sizes have the same."""
    saved: int
    node: Callable[[], Any]
    """Returns the autograd node while that lives."""
    waits: bool = True


class SavedTogether:
    """The training graphs of one model whose saved tensors wait for backward."""

    def __init__(self, settings: Settings) -> None:
        self._budget = settings.activation_budget
        self._calls: list[_Call] = []

    def saw(self, graph: PlannedGraph, results: object) -> None:
        """Note that a training graph ran forward. Raises `FallbackError` under ``strict`` if too much waits."""
        plan, found = graph.plan, first_compiled(results)
        if self._budget is None or plan is None or plan.saved_bytes is None or found is None:
            return
        self._calls = [call for call in self._calls if call.waits and call.node() is not None]
        call = _Call(graph.parameters.ids or graph.index, plan.saved_bytes.planned, weakref.ref(found[1]))
        self._calls.append(call)
        compat.on_gradient(found[0], lambda _: setattr(call, "waits", False))
        most: dict[Hashable, int] = {}
        for other in self._calls:
            most[other.layers] = max(other.saved, most.get(other.layers, 0))
        if len(most) > 1 and sum(most.values()) > self._budget:
            budget, self._budget, self._calls = self._budget, None, []
            graph.compiler.log.tell(
                "activation_budget",
                f"it bounds what each graph saves, {readable(budget)}, and {len(most)} graphs of the step save "
                f"{readable(sum(most.values()))} together; compile the model without graph breaks, or give "
                "peak_budget, which the graphs of a step share",
                step=graph.step,
            )
