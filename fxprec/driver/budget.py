"""Check ``activation_budget`` and ``peak_budget`` against compiled code, for one graph and for all graphs of a step.

A plan predicts the bytes that it saves and its peak. The partitioned graph and the compiled halves show the real
numbers. If a real number is above the budget, another plan is made with a tighter bound.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction

from fxprec import compat
from fxprec.config import Settings
from fxprec.config.settings import PeakBudget as AskedPeak
from fxprec.driver.event_log import EventLog
from fxprec.errors import BudgetError
from fxprec.passes.crossings.reserve import enough_for
from fxprec.passes.crossings.together import Together
from fxprec.passes.notice import raised, readable
from fxprec.passes.part import Part
from fxprec.plan import PeakBytes

if TYPE_CHECKING:
    from fxprec.driver.graph import PlannedGraph

ATTEMPTS = 5  # plans made for one peak budget, each compiled; the second nearly always fits
_MARGIN = 0.98  # share of the budget tried first, because compiled code differs a little from the prediction
_SLACK = 0.02  # share of an activation budget by which a plan may overpredict without another attempt
SAVED_ATTEMPTS = 4  # plans made for one activation budget; the first shows what is saved besides, so the second fits


class SavedBudget:
    """The activation budget of one graph, and the bytes that its plans really saved."""

    def __init__(self, settings: Settings, log: EventLog) -> None:
        self.settings, self.log = settings, log
        self.fixed = 0  # bytes saved beyond the prediction for the counted tensors
        self._saved: list[int] = []  # bytes, of each plan above the budget
        self._corrections = 2  # attempts left for plans that are within the budget but predicted too much
        self._told = 0  # bytes last reported for a given or promoted plan above the budget

    def hold(self, predicted: int, saved: int) -> bool:
        """Return whether ``saved`` bytes are accepted; if not, add the difference to the prediction to ``fixed``.

        A plan that predicted too much makes more tensors low than necessary, so two such plans are refused too. Raises
        `BudgetError` if a plan saves no less than an earlier one, or if `SAVED_ATTEMPTS` plans were above the budget.
        """
        budget = self.settings.activation_budget
        if budget is None:
            return True
        if saved <= budget:
            is_exact = not self._corrections or predicted <= saved + _SLACK * budget
            if not is_exact:
                self._corrections -= 1
                self.fixed += saved - predicted
            return is_exact
        self._corrections = 0
        if len(self._saved) + 1 == SAVED_ATTEMPTS or any(saved >= before for before in self._saved):
            from fxprec.passes.analysis.assignment import over_budget

            raise over_budget(self.settings, min(*self._saved, saved))
        self._saved.append(saved)
        self.fixed += saved - predicted
        return False

    def tell(self, saved: int, step: int) -> None:
        """Warn if a given or promoted plan saves more than the budget; such a plan takes precedence over the budget."""
        budget = self.settings.activation_budget
        if budget is None or saved <= max(budget, self._told):
            return
        self._told = saved
        detail = f"{readable(saved)} are saved for backward since tensors were promoted, or as the given plan wants"
        self.log.warn(f"activation_budget {readable(budget)}: {detail}")
        self.log.note("fallback", self.log.name, detail, step=step)


class PeakBudget:
    """The peak budget of one graph, and the peaks of its plans as compiled."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.part = Part()
        self.tried: list[tuple[int, int]] = []
        """For each plan made for the budget: its predicted peak and its peak as compiled, in bytes."""
        self._told = 0  # bytes last reported for a given or promoted plan above the budget

    def take(self, part: Part) -> None:
        """Set the part of the budget that later plans are made for."""
        self.part, self.tried = part, []

    def hold(self, planned: PeakBytes, held: int, waiting: int) -> PeakBytes | None:
        """Return ``planned`` with the compiled peak and the bytes live between the halves; None to plan again.

        Raises `BudgetError` if `ATTEMPTS` plans were above the budget.
        """
        self.tried.append((planned.planned, held))
        is_within = held <= planned.room and waiting <= self.part.waiting
        if is_within or self.part.is_provisional:
            return replace(planned, compiled=held, waiting=waiting)
        least = min(held for _, held in self.tried)
        if len(self.tried) == ATTEMPTS:
            beside = f", {readable(planned.beside)} of it for other graphs" if planned.beside else ""
            beside += f", {readable(planned.reserved)} of it for libraries" if planned.reserved else ""
            wanted = least + planned.beside
            if planned.reserved:
                wanted = enough_for(least - planned.room, planned.budget)
            high = 0 if planned.graphs > 1 or planned.reserved else planned.high
            asked = f"{readable(planned.budget)}{beside}"
            found = f"of {ATTEMPTS} plans made for it the best holds {readable(least)} as compiled"
            raise BudgetError.of_peak(asked, found, wanted, raised(wanted, high), ["take a smaller batch"])
        assert planned.waiting is not None
        part = self.part
        if held > planned.room:
            part = replace(part, beyond=part.beyond + held - planned.planned)
        if waiting > part.waiting:
            part = replace(part, beyond_waiting=part.beyond_waiting + waiting - planned.waiting)
        self.part = part
        detail = f"a plan that predicts {readable(planned.planned)} at the peak holds {readable(held)} as compiled"
        self.log.note("replanned", self.log.name, f"{detail}; planned again within {readable(planned.room)}")
        return None

    def tell(self, planned: PeakBytes, held: int, step: int) -> PeakBytes:
        """Warn if a given or promoted plan exceeds the budget; such a plan takes precedence. Return it as compiled."""
        if held > max(planned.room, self._told):
            self._told = held
            detail = f"the step holds {readable(held)} since tensors were promoted, or as the given plan wants"
            self.log.warn(f"peak_budget {readable(planned.budget)}: {detail}")
            self.log.note("fallback", self.log.name, detail, step=step)
        return replace(planned, compiled=held)


class SharedPeak:
    """The training graphs of one model under one ``peak_budget``, and the orders in which steps call them.

    After a graph break several graphs run in one step. The first step shows which; in it each graph uses as little
    memory as it can. When the next step begins, the budget is divided so that the whole step is fastest
    (`passes.crossings.together`), and each graph is compiled for its part.
    """

    def __init__(self, settings: Settings) -> None:
        self._asked = settings.peak_budget
        self._graphs: dict[int, PlannedGraph] = {}
        self._calls: list[tuple[int, Callable[[], Any]]] = []  # graph, weak reference to its autograd node
        self._is_backward = False
        self._known: list[tuple[int, ...]] = []

    def first_part(self, *, is_cut: bool) -> Part:
        """Return the budget part of a new graph. ``is_cut``: another graph follows in the step."""
        is_one_of_several = is_cut or (self._waits() and not self._is_backward)
        return Part(is_provisional=self._asked is not None and is_one_of_several)

    def saw(self, graph: PlannedGraph, results: object) -> None:
        """Note that a training graph ran forward."""
        if self._asked is None:
            return
        found = next(((r, node) for r in _tensors(results) if (node := _compiled_node(r)) is not None), None)
        if found is None:
            return
        self._waits()
        self._graphs[graph.index] = graph
        self._calls.append((graph.index, weakref.ref(found[1])))
        compat.on_gradient(found[0], self._saw_backward)

    def forget(self) -> None:
        """Forget all graphs and calls, because the compiled code is no longer called."""
        self._graphs, self._calls, self._known, self._is_backward = {}, [], [], False

    def _saw_backward(self, grad: torch.Tensor) -> None:
        self._is_backward = True

    def _waits(self) -> bool:
        """Forget calls whose results are freed, as no backward will come. Return whether calls await their backward."""
        if not self._is_backward:
            self._calls = [(index, node) for index, node in self._calls if node() is not None]
        return bool(self._calls)

    def begin(self) -> None:
        """Divide the budget between the graphs of the last step, if this forward begins a new step.

        A forward begins a new step if a backward has run. Raises `BudgetError` if the graphs do not fit together.
        """
        asked = self._asked
        if asked is None or not self._is_backward:
            return
        calls = tuple(index for index, _ in self._calls)
        self._calls, self._is_backward = [], False
        if not calls or calls in self._known:
            return
        self._known.append(calls)
        if len(calls) > 1 or self._graphs[calls[0]].compiler.peak.part.is_provisional:
            self._share(asked)

    def _share(self, asked: AskedPeak) -> None:
        numbers = dict.fromkeys(index for calls in self._known for index in calls)
        graphs = {index: self._graphs[index] for index in numbers}
        peaks = {index: peak for index, graph in graphs.items() if (peak := graph.peak_with_points()) is not None}
        if len(peaks) < len(graphs):  # one plan was given by a file or checkpoint, so all plans stay as they are
            return
        for index, part in self._parts(asked, graphs, peaks).items():
            graphs[index].take_part(part)

    def _parts(
        self, asked: AskedPeak, graphs: Mapping[int, PlannedGraph], peaks: Mapping[int, PeakBytes]
    ) -> Mapping[int, Part]:
        gradients = {index: graph.captured.gradient_bytes(graph.compiler.stepped) for index, graph in graphs.items()}
        together = Together({i: peak.points for i, peak in peaks.items()}, self._known, gradients)
        budget = asked.bytes_of(together.peak({i: peak.points[0] for i, peak in peaks.items()}))
        room = budget - max(peak.reserved for peak in peaks.values())
        chosen = together.within(_MARGIN * room) or together.within(room)
        if chosen is None:
            least = together.least()
            of = "the training graph" if len(graphs) == 1 else f"the {len(graphs)} training graphs of a step together"
            raise BudgetError(
                f"peak_budget is {readable(budget)} for {of}, and the "
                f"least peak found holds {readable(least)}; raise it to {readable(least)}, take a smaller batch, or "
                "compile the model without graph breaks"
            )
        return together.parts(chosen, budget)


def _compiled_node(result: torch.Tensor) -> Any:
    """Return the autograd node of the compiled function behind a result, or None. Skips views that AOTAutograd adds."""
    node = result.grad_fn
    while node is not None and not isinstance(node, BackwardCFunction):
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return node


def _tensors(results: object) -> list[torch.Tensor]:
    return [r for r in (results if isinstance(results, list | tuple) else [results]) if isinstance(r, torch.Tensor)]
