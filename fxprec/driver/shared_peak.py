"""One ``peak_budget`` for all graphs that run in one step, as after a graph break.

Which graphs those are shows in the first step, where each holds as little as it can. When the next begins, each gets
the part of the budget that makes the whole step fastest (`passes.analysis.peak.together`), and is compiled for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction

from fxprec.config import Settings
from fxprec.config.settings import PeakBudget
from fxprec.errors import BudgetError
from fxprec.passes.analysis.peak.part import Part
from fxprec.passes.analysis.peak.together import Together
from fxprec.passes.notice import readable
from fxprec.plan import PeakBytes

_MARGIN = 0.98  # of the budget, where that much is enough: what is compiled differs a little from what is predicted


class SharingGraph(Protocol):
    """A training graph whose plan was made for a peak budget."""

    @property
    def index(self) -> int: ...

    @property
    def gradient_bytes(self) -> int: ...

    @property
    def is_provisional(self) -> bool: ...

    def peak_with_points(self) -> PeakBytes | None: ...

    def take_part(self, part: Part) -> None: ...


class SharedPeak:
    """The training graphs of one model under one budget, and the orders in which steps call them."""

    def __init__(self, settings: Settings) -> None:
        self._asked = settings.peak_budget
        self._graphs: dict[int, SharingGraph] = {}
        self._calls: list[tuple[int, Callable[[], Any]]] = []  # with what tells whether its backward may come
        self._is_backward = False
        self._known: list[tuple[int, ...]] = []

    def first_part(self, *, is_cut: bool) -> Part:
        """Return the part of a new graph; with ``is_cut`` another follows."""
        is_one_of_several = is_cut or (self._waits() and not self._is_backward)
        return Part(is_provisional=self._asked is not None and is_one_of_several)

    def saw(self, graph: SharingGraph, results: Any) -> None:
        """Note that a training graph ran forward."""
        if self._asked is None:
            return
        found = next(((r, node) for r in _tensors(results) if (node := _compiled_node(r)) is not None), None)
        if found is None:
            return
        self._waits()
        self._graphs[graph.index] = graph
        self._calls.append((graph.index, weakref.ref(found[1])))
        found[0].register_hook(self._saw_backward)

    def forget(self) -> None:
        """What was compiled is no longer called."""
        self._graphs, self._calls, self._known, self._is_backward = {}, [], [], False

    def _saw_backward(self, grad: torch.Tensor) -> None:
        self._is_backward = True

    def _waits(self) -> bool:
        """Forget calls whose results are gone: no backward will come. Say whether others wait for theirs."""
        if not self._is_backward:
            self._calls = [(index, node) for index, node in self._calls if node() is not None]
        return bool(self._calls)

    def begin(self) -> None:
        """A forward begins, of a new step where backward has run: share the budget between the graphs of the last.

        Raises `BudgetError` where all do not fit.
        """
        asked = self._asked
        if asked is None or not self._is_backward:
            return
        calls = tuple(index for index, _ in self._calls)
        self._calls, self._is_backward = [], False
        if not calls or calls in self._known:
            return
        self._known.append(calls)
        if len(calls) > 1 or self._graphs[calls[0]].is_provisional:
            self._share(asked)

    def _share(self, asked: PeakBudget) -> None:
        numbers = dict.fromkeys(index for calls in self._known for index in calls)
        graphs = {index: self._graphs[index] for index in numbers}
        peaks = {index: peak for index, graph in graphs.items() if (peak := graph.peak_with_points()) is not None}
        if len(peaks) < len(graphs):  # of one the plan came with a checkpoint: it stays, and so do the others
            return
        for index, part in self._parts(asked, graphs, peaks).items():
            graphs[index].take_part(part)

    def _parts(
        self, asked: PeakBudget, graphs: Mapping[int, SharingGraph], peaks: Mapping[int, PeakBytes]
    ) -> Mapping[int, Part]:
        gradients = {index: graph.gradient_bytes for index, graph in graphs.items()}
        together = Together({i: peak.points for i, peak in peaks.items()}, self._known, gradients)
        budget = asked.bytes_of(together.peak({i: peak.points[0] for i, peak in peaks.items()}))
        room = budget - max(peak.reserved for peak in peaks.values())
        chosen = together.within(_MARGIN * room) or together.within(room)
        if chosen is None:
            least = together.least()
            raise BudgetError(
                f"peak_budget is {readable(budget)} for the {len(graphs)} training graphs of a step together, and the "
                f"least peak found holds {readable(least)}; raise it to {readable(least)}, take a smaller batch, or "
                "compile the model without graph breaks"
            )
        return together.parts(chosen, budget)


def _compiled_node(result: torch.Tensor) -> Any:
    """Return the compiled function's node behind a result, or None; views that AOTAutograd makes again lie between."""
    node: Any = result.grad_fn
    while node is not None and not isinstance(node, BackwardCFunction):
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return node


def _tensors(results: Any) -> list[torch.Tensor]:
    return [r for r in (results if isinstance(results, list | tuple) else [results]) if isinstance(r, torch.Tensor)]
