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


_OF_ALL_MODELS: weakref.WeakSet[SavedTogether] = weakref.WeakSet()


class SavedTogether:
    """The training graphs of one model whose saved tensors wait for backward."""

    def __init__(self, settings: Settings) -> None:
        self._budget = settings.activation_budget
        self._calls: list[_Call] = []
        self._told_of_others = False
        if self._budget is not None:
            _OF_ALL_MODELS.add(self)

    def saw(self, graph: PlannedGraph, results: object) -> None:
        """Note that a training graph ran forward. Raises `FallbackError` under ``strict`` if too much waits."""
        plan, found = graph.plan, first_compiled(results)
        if self._budget is None or plan is None or plan.saved_bytes is None or found is None:
            return
        call = _Call(graph.parameters.ids or graph.index, plan.saved_bytes.planned, weakref.ref(found[1]))
        self._calls.append(call)
        compat.on_gradient(found[0], lambda _: setattr(call, "waits", False))
        most = self._waiting()
        if not self._told_of_others:
            self._look_at_others(graph, self._budget, sum(most.values()))
        if len(most) > 1 and sum(most.values()) > self._budget:
            budget, self._budget, self._calls = self._budget, None, []
            graph.compiler.log.tell(
                "activation_budget",
                f"it bounds what each graph saves, {readable(budget)}, and {len(most)} graphs of the step save "
                f"{readable(sum(most.values()))} together; compile the model without graph breaks, or give "
                "peak_budget, which the graphs of a step share",
                step=graph.step,
            )

    def _waiting(self) -> dict[Hashable, int]:
        """Return the bytes that wait for backward, by layers: of a graph with several batch sizes, the most."""
        self._calls = [call for call in self._calls if call.waits and call.node() is not None]
        most: dict[Hashable, int] = {}
        for call in self._calls:
            most[call.layers] = max(call.saved, most.get(call.layers, 0))
        return most

    def _look_at_others(self, graph: PlannedGraph, budget: int, own: int) -> None:
        """Warn once if graphs of several backends save more than the budget of one of them together."""
        others = sum(sum(model._waiting().values()) for model in _OF_ALL_MODELS if model is not self)
        if others and own + others > budget:
            self._told_of_others = True
            graph.compiler.log.warn_once(
                "activation_budget",
                f"it bounds what each graph saves, {readable(budget)}; graphs of other backends, which have a budget "
                f"of their own, save {readable(others)} in the same step; to bound them together compile all with one "
                "fxprec.Backend that has a peak_budget",
                step=graph.step,
            )
