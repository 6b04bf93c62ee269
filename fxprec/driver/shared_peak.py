"""Bound the training graphs of one step together, as after a graph break.

The graphs share one ``peak_budget``. An ``activation_budget`` bounds each graph by itself, which is said where several
graphs save more together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction

from fxprec import compat
from fxprec.config import Settings
from fxprec.config.settings import PeakBudget
from fxprec.errors import BudgetError
from fxprec.passes.budget_part import BudgetPart
from fxprec.passes.crossings.shared_budget import Order, SharedBudget
from fxprec.passes.notice import hold_less, readable
from fxprec.plan import PeakBytes
from fxprec.plan.rows import PeakPoint

if TYPE_CHECKING:
    from fxprec.driver.graph import PlannedGraph

_MARGIN = 0.98  # share of the budget tried first, because compiled code differs a little from the prediction


@dataclass(eq=False)
class _Call:
    """A forward call of a training graph."""

    graph: int
    node: Callable[[], Any]
    """Returns its autograd node while that lives."""
    is_in_backward: bool = False
    """Whether its backward has begun."""

    @property
    def waits(self) -> bool:
        """Whether its backward may still come."""
        return not self.is_in_backward and self.node() is not None


def _call_of(graph: PlannedGraph, results: object, begins: Callable[[_Call], None]) -> _Call | None:
    """Return the call that gave ``results``, or None without a backward; ``begins`` gets it as its backward begins."""
    tensors = (r for r in (results if isinstance(results, list | tuple) else [results]) if isinstance(r, torch.Tensor))
    found = next(((r, node) for r in tensors if (node := _compiled_node(r)) is not None), None)
    if found is None:
        return None
    call = _Call(graph.index, weakref.ref(found[1]))
    compat.on_gradient(found[0], lambda _: begins(call))
    return call


def _compiled_node(result: torch.Tensor) -> Any:
    """Return the autograd node of the compiled function behind a result, or None. Skips views that AOTAutograd adds."""
    node = result.grad_fn
    while node is not None and not isinstance(node, BackwardCFunction):
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return node


_WITH_PEAK_BUDGETS: weakref.WeakSet[SharedPeak] = weakref.WeakSet()
_WITH_ACTIVATION_BUDGETS: weakref.WeakSet[SavedTogether] = weakref.WeakSet()
_APART = (
    "it bounds what the graphs of one backend hold; tensors of another backend's graphs, which have a budget of their "
    "own, wait for backward in the same step; compile both models with one fxprec.Backend to bound them together"
)


class SharedPeak:
    """The training graphs of one model under one ``peak_budget``, and the orders in which steps call them.

    After a graph break several graphs run in one step. The first step shows which; in it each graph uses as little
    memory as it can. When the next step begins, the budget is divided so that the whole step is fastest
    (`passes.crossings.shared_budget`), and each graph is compiled for its part.
    """

    def __init__(self, settings: Settings) -> None:
        self._asked = settings.peak_budget
        self._graphs: dict[int, PlannedGraph] = {}
        self._calls: list[_Call] = []
        self._halves: list[tuple[_Call, bool]] = []  # that have begun, in that order; True: the backward half
        self._is_backward = False  # whether a backward of the step has begun
        self._known: list[Order] = []
        self._is_told = False  # that another model's tensors wait in the same step
        if self._asked is not None:
            _WITH_PEAK_BUDGETS.add(self)

    def first_part(self, *, is_cut: bool) -> BudgetPart:
        """Return the budget part of a new graph. ``is_cut``: another graph follows in the step."""
        is_one_of_several = is_cut or (self._waits() and not self._is_backward)
        return BudgetPart(is_provisional=self._asked is not None and is_one_of_several)

    def saw(self, graph: PlannedGraph, results: object) -> None:
        """Note that a training graph ran forward."""
        if self._asked is None:
            return
        self._waits()
        halves = self._halves
        call = _call_of(graph, results, lambda call: self._saw_backward(call, halves))
        if call is None:
            return
        self._graphs[graph.index] = graph
        self._calls.append(call)
        halves.append((call, False))
        others = (model for model in _WITH_PEAK_BUDGETS if model is not self)
        if not self._is_told and any(call.waits for model in others for call in model._calls):
            self._is_told = True
            graph.compiler.log.warn_once("peak_budget", _APART)

    def forget(self) -> None:
        """Forget all graphs and calls, because the compiled code is no longer called."""
        self._graphs, self._calls, self._halves, self._known, self._is_backward = {}, [], [], [], False

    def _saw_backward(self, call: _Call, halves: list[tuple[_Call, bool]]) -> None:
        """Note a backward, unless it belongs to an earlier step."""
        if halves is self._halves and not call.is_in_backward:
            call.is_in_backward = self._is_backward = True
            halves.append((call, True))

    def _waits(self) -> bool:
        """Forget calls whose results are freed, as no backward will come. Return whether calls await their backward."""
        if not self._is_backward:
            self._calls = [call for call in self._calls if call.node() is not None]
            self._halves[:] = [(call, False) for call in self._calls]
        return bool(self._calls)

    def begin(self) -> None:
        """Divide the budget between the graphs of the last step, if this forward begins a new step.

        A forward begins a new step if a backward of the step before has run. Raises `BudgetError` if the graphs do not
        fit together.
        """
        asked = self._asked
        if asked is None or not self._is_backward:
            return
        calls = tuple(call.graph for call in self._calls)
        at = {call: i for i, call in enumerate(self._calls)}
        order = Order(calls, tuple((at[call], is_backward) for call, is_backward in self._halves))
        self._calls, self._halves, self._is_backward = [], [], False
        if order in self._known:
            return
        self._known.append(order)
        if len(calls) > 1 or self._graphs[calls[0]].compiler.peak.part.is_provisional:
            self._share(asked)

    def _share(self, asked: PeakBudget) -> None:
        numbers = dict.fromkeys(index for order in self._known for index in order.calls)
        graphs = {index: self._graphs[index] for index in numbers}
        peaks = {index: peak for index, graph in graphs.items() if (peak := graph.peak_with_points()) is not None}
        if len(peaks) < len(graphs):  # one plan was given by a file or checkpoint, so all plans stay as they are
            return
        for index, part in self._parts(asked, graphs, peaks).items():
            graphs[index].take_part(part)

    def _parts(
        self, asked: PeakBudget, graphs: Mapping[int, PlannedGraph], peaks: Mapping[int, PeakBytes]
    ) -> Mapping[int, BudgetPart]:
        gradients = {index: graph.captured.gradient_bytes(graph.compiler.stepped) for index, graph in graphs.items()}
        points = {i: _as_compiled(peak) for i, peak in peaks.items()}
        shared = SharedBudget(points, self._known, gradients)
        budget = asked.bytes_of(shared.peak({i: found[0] for i, found in points.items()}))
        room = budget - max(peak.reserved for peak in peaks.values())
        chosen = shared.within(_MARGIN * room) or shared.within(room)
        if chosen is None:
            least = shared.least()
            of = "the training graph" if len(graphs) == 1 else f"the {len(graphs)} training graphs of a step together"
            way = hold_less(sum(gradients.values()), least)
            raise BudgetError(
                f"peak_budget is {readable(budget)} for {of}, and the lowest peak found is {readable(least)}; raise it "
                f"to {readable(least)}, {way}, or compile the model without graph breaks"
            )
        return shared.parts(chosen, budget)


def _as_compiled(peak: PeakBytes) -> Sequence[PeakPoint]:
    """Return the choices for a graph, each with the bytes that the first step's code held beyond its prediction."""
    if peak.compiled is None or peak.graphs > 1:  # not of the first step, whose plan is the last point
        return peak.points
    beyond = max(peak.compiled - peak.planned, 0)
    waiting = max((peak.waiting or 0) - peak.points[-1].waiting, 0)
    return [replace(p, peak=p.peak + beyond, waiting=p.waiting + waiting) for p in peak.points]


class SavedTogether:
    """The training graphs of one model whose saved tensors wait for backward, under an ``activation_budget``."""

    def __init__(self, settings: Settings) -> None:
        self._budget = settings.activation_budget
        self._calls: list[tuple[_Call, Hashable, int]] = []
        """Calls, each with its graph's layers, which graphs for several batch sizes share, and the bytes it saves."""
        self._told_of_others = False
        if self._budget is not None:
            _WITH_ACTIVATION_BUDGETS.add(self)

    def saw(self, graph: PlannedGraph, results: object) -> None:
        """Note that a training graph ran forward. Raises `FallbackError` under ``strict`` if too much waits."""
        plan = graph.plan
        if self._budget is None or plan is None or plan.saved_bytes is None:
            return
        call = _call_of(graph, results, lambda call: setattr(call, "is_in_backward", True))
        if call is None:
            return
        self._calls.append((call, graph.parameters.ids or graph.index, plan.saved_bytes.planned))
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
        self._calls = [one for one in self._calls if one[0].waits]
        most: dict[Hashable, int] = {}
        for _, layers, saved in self._calls:
            most[layers] = max(saved, most.get(layers, 0))
        return most

    def _look_at_others(self, graph: PlannedGraph, budget: int, own: int) -> None:
        """Warn once if graphs of several backends save more than the budget of one of them together."""
        others = sum(sum(model._waiting().values()) for model in _WITH_ACTIVATION_BUDGETS if model is not self)
        if others and own + others > budget:
            self._told_of_others = True
            graph.compiler.log.warn_once(
                "activation_budget",
                f"it bounds what each graph saves, {readable(budget)}; graphs of other backends, which have a budget "
                f"of their own, save {readable(others)} in the same step; to bound them together compile all with one "
                "fxprec.Backend that has a peak_budget",
                step=graph.step,
            )
