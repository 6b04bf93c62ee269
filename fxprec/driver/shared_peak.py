"""Share one ``peak_budget`` between the training graphs of a step, as after a graph break."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
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


_OF_ALL_MODELS: weakref.WeakSet[SharedPeak] = weakref.WeakSet()
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
            _OF_ALL_MODELS.add(self)

    def first_part(self, *, is_cut: bool) -> BudgetPart:
        """Return the budget part of a new graph. ``is_cut``: another graph follows in the step."""
        is_one_of_several = is_cut or (self._waits() and not self._is_backward)
        return BudgetPart(is_provisional=self._asked is not None and is_one_of_several)

    def saw(self, graph: PlannedGraph, results: object) -> None:
        """Note that a training graph ran forward."""
        if self._asked is None:
            return
        found = first_compiled(results)
        if found is None:
            return
        self._waits()
        self._graphs[graph.index] = graph
        call = _Call(graph.index, weakref.ref(found[1]))
        self._calls.append(call)
        halves = self._halves
        halves.append((call, False))
        compat.on_gradient(found[0], lambda _: self._saw_backward(call, halves))
        if not self._is_told and any(other is not self and other._holds for other in _OF_ALL_MODELS):
            self._is_told = True
            graph.compiler.log.warn_once("peak_budget", _APART)

    @property
    def _holds(self) -> bool:
        """Return whether calls of this model await their backward."""
        return any(not call.is_in_backward and call.node() is not None for call in self._calls)

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


def first_compiled(results: object) -> tuple[torch.Tensor, Any] | None:
    """Return the first result that a compiled function's autograd node made, with the node; None if there is none."""
    return next(((r, node) for r in _tensors(results) if (node := _compiled_node(r)) is not None), None)


def _compiled_node(result: torch.Tensor) -> Any:
    """Return the autograd node of the compiled function behind a result, or None. Skips views that AOTAutograd adds."""
    node = result.grad_fn
    while node is not None and not isinstance(node, BackwardCFunction):
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return node


def _tensors(results: object) -> list[torch.Tensor]:
    return [r for r in (results if isinstance(results, list | tuple) else [results]) if isinstance(r, torch.Tensor)]
