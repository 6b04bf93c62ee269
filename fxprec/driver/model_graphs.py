"""The compiled graphs of one backend, and the saved states and plans that wait for graphs to come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxprec.config import Settings
from fxprec.driver import capture, saved_state
from fxprec.driver.graph import PlannedGraph
from fxprec.driver.parameters import Parameters
from fxprec.driver.shared_peak import SharedPeak
from fxprec.driver.skip_steps import StepSkipper
from fxprec.errors import PlanError
from fxprec.plan import Plan
from fxprec.report.dump_folder import DumpFolder

if TYPE_CHECKING:
    from fxprec.driver.recorder import Recorder


class ModelGraphs:
    """Makes graphs, in the order of their first calls; ``given`` is the plan that the user gave."""

    def __init__(
        self,
        settings: Settings,
        given: Plan | None,
        skips: StepSkipper | None,
        dump: DumpFolder | None,
        *,
        recorder: Recorder | None,
    ) -> None:
        self._settings, self._given, self._skips, self._dump = settings, given, skips, dump
        self._recorder = recorder
        self.all: list[PlannedGraph] = []
        self._dropped: list[PlannedGraph] = []  # by torch.compiler.reset(), and not traced again yet
        self._waiting = saved_state.Waiting()
        self._shared_peak = SharedPeak(settings)

    @property
    def live(self) -> list[PlannedGraph]:
        return [graph for graph in self.all if not graph.is_replaced]

    def drop(self) -> None:
        """What was compiled is no longer called: what is traced next takes over the state of what it replaces."""
        self._dropped = self.live
        self._shared_peak.forget()

    def planned(self, captured: capture.Captured, parameters: Parameters) -> PlannedGraph:
        """Compile a graph for the layer with these parameters; it takes over the state saved for it."""
        identity = captured.identity
        dropped = saved_state.likeliest(identity, self._dropped, lambda g: g.captured.identity)
        old = next(iter(dropped), None)
        waiting = self._waiting.fitting(identity, [g.captured.identity for g in self.all])
        kept, mismatch = _state_of(old), None
        for saved in waiting or ([] if kept is None else [kept]):
            try:
                graph = self._built(captured, parameters, saved)
            except PlanError as error:
                mismatch = error
            else:
                self._waiting.take(saved)
                break
        else:
            if mismatch is not None and old is None:
                raise mismatch
            if mismatch is not None:
                old = None  # another model with parameters of the same names
            graph = self._built(captured, parameters, None)
        if old is not None:
            old.is_replaced = True
            self._dropped.remove(old)
        self.all.append(graph)
        return graph

    def _built(
        self, captured: capture.Captured, parameters: Parameters, saved: saved_state.SavedGraph | None
    ) -> PlannedGraph:
        given = self._given_to(captured) if saved is None else saved.plan
        dump = None if self._dump is None else self._dump.graph(len(self.all))
        graph = PlannedGraph(
            captured,
            parameters,
            self._settings,
            self.all,
            self._skips,
            dump,
            recorder=self._recorder,
            waiting=self._plans_ahead,
            shared=self._shared_peak,
        ).compile(given)
        if saved is not None and graph.controller is not None:
            graph.controller.load_state_dict(saved.state)
        return graph

    def _given_to(self, captured: capture.Captured) -> Plan | None:
        """Return the plan file, but not for evaluation where it is of a training graph: that follows its groups."""
        if self._given is None or (saved_state.is_of_training(self._given) and not captured.identity.is_training):
            return None
        return self._given

    def _plans_ahead(self) -> tuple[Plan, ...]:
        """Return the plans of training graphs that are known before those compile, the latest last."""
        given = () if self._given is None or not saved_state.is_of_training(self._given) else (self._given,)
        return (*given, *self._waiting.training_plans)

    def states(self) -> list[saved_state.GraphState | None]:
        """Return the states of all graphs, and those that were loaded for graphs not compiled yet."""
        for graph in self.live:
            graph.share_promotions()
        return [*(g.state_dict() for g in self.live), *self._waiting.states]

    def load(self, states: Sequence[saved_state.GraphState | None]) -> None:
        """Give each graph the state saved of it; the others wait. Raises `PlanError`, and then changes nothing."""
        waiting = saved_state.Waiting(states)
        found: list[tuple[PlannedGraph, saved_state.SavedGraph]] = []
        earlier: list[saved_state.Identity] = []
        for graph in sorted(self.live, key=lambda g: waiting.distance(g.captured.identity)):
            saved = graph.own_state(waiting.fitting(graph.captured.identity, earlier))
            if saved is not None:
                found.append((graph, saved))
                waiting.take(saved)
            earlier.append(graph.captured.identity)
        for graph, saved in found:
            graph.load_state(saved)
        self._waiting = waiting


def _state_of(graph: PlannedGraph | None) -> saved_state.SavedGraph | None:
    state = None if graph is None else graph.state_dict()
    return None if state is None else saved_state.SavedGraph(state)
