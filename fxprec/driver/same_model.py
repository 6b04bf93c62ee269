"""The graphs compiled before one graph for the same backend: whose promotions it takes over, whose plans it follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from fxprec.plan import Plan
from fxprec.plan.plan import latest_of_gemms
from fxprec.runtime.controller import Controller

if TYPE_CHECKING:
    from fxprec.driver.graph import PlannedGraph


class SameModel:
    """One graph's view of ``graphs``; ``waiting`` gives plans of training graphs that are not compiled yet."""

    def __init__(
        self, own: PlannedGraph, graphs: Sequence[PlannedGraph], waiting: Callable[[], tuple[Plan, ...]]
    ) -> None:
        self._own, self._graphs, self._waiting = own, graphs, waiting
        self._same: dict[int, bool] = {}  # whether the graph of that index trains the same
        self._taken: dict[int, Plan] = {}  # by index, the plan of it whose promotions are taken over
        self._followed: Plan | None = None  # the training plan an inference graph follows

    @property
    def others_in_training(self) -> Iterator[PlannedGraph]:
        return (g for g in self._graphs if g is not self._own and g.is_training)

    def plans(self) -> tuple[Plan, ...]:
        """Return the plans of training to follow, the latest last; an equal layer's is none of them."""
        training = (g for g in self._graphs if g.is_training and not g.is_replaced)
        own = (g for g in training if not g.parameters.of_another(self._own.parameters))
        return (*self._waiting(), *(g.plan for g in own if g.plan is not None))

    def to_follow(self, plan: Plan) -> Plan | None:
        """Return the latest plan of training that evaluation with ``plan`` does not follow yet."""
        trained = latest_of_gemms(self.plans(), plan.gemms_by_name)
        if trained is None or trained is self._followed:
            return None
        self._followed = trained
        return trained

    def share_promotions(self, controller: Controller) -> None:
        """Promote what other training graphs of the model have promoted, those of other batch sizes above all."""
        if controller.rules.promote_above is None:
            return
        for graph in self._graphs:
            theirs = graph.controller
            if theirs is None or theirs is controller or graph.is_replaced or not self._trains_the_same(graph):
                continue
            theirs.catch_up()
            if self._taken.get(graph.index) is not theirs.plan:
                self._taken[graph.index] = theirs.plan
                controller.promote_as(theirs.plan, f"promoted in graph {graph.index}, of the same model")

    def _trains_the_same(self, other: PlannedGraph) -> bool:
        if other.index not in self._same:
            plan, theirs = self._own.plan, other.plan
            self._same[other.index] = (
                other.is_training
                and plan is not None
                and theirs is not None
                and theirs.gemms_by_name == plan.gemms_by_name
                and not other.parameters.of_another(self._own.parameters)
            )
        return self._same[other.index]
