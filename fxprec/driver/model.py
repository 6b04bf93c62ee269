"""The compiled graphs of one model, and the loaded states and plans of graphs that are not compiled yet."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import Parameter

from fxprec import compat
from fxprec.config import Settings
from fxprec.driver import saved_state
from fxprec.driver.capture import Captured, Parameters
from fxprec.driver.graph import PlannedGraph
from fxprec.driver.plan_changes import HighOperands
from fxprec.driver.saved_state import GraphState, Identity, SavedGraph, Waiting
from fxprec.driver.shared_peak import SavedTogether, SharedPeak
from fxprec.errors import PlanError
from fxprec.plan import Plan
from fxprec.report.dump_folder import DumpFolder
from fxprec.runtime.scaling.skip_steps import StepSkipper

if TYPE_CHECKING:
    from fxprec.driver.record import Recorder
    from fxprec.runtime.optim.in_backward import InBackward


class Model:
    """All graphs of one model, in the order of their first calls. Graphs get plans and promotions from each other here.

    ``given`` is the plan that the user gave.
    """

    def __init__(
        self,
        settings: Settings,
        given: Plan | None,
        skips: StepSkipper | None,
        dump: DumpFolder | None,
        recorder: Recorder | None,
    ) -> None:
        self.settings, self.skips, self.recorder = settings, skips, recorder
        self.binding: InBackward | None = None  # the optimizers whose parameters are stepped during backward
        self.step_budget: int | None = None  # bytes, including weights and optimizer states
        self.high_operands = HighOperands(settings.recipe)
        self.shared_peak = SharedPeak(settings)
        self.saved_together = SavedTogether(settings)
        self.all: list[PlannedGraph] = []
        self.lock = threading.RLock()
        """Locked while a step begins. A thread that holds torch's compile lock must not wait for it."""
        self.calls = 0  # of all graphs together
        self._given, self._dump = given, dump
        self._dropped: list[PlannedGraph] = []  # by torch.compiler.reset(), and not traced again yet
        self._waiting = Waiting()
        self._taken: dict[tuple[int, int], Plan] = {}  # (to, from): the plan whose promotions were last taken over
        # Both are read in each forward, and made again after a change: a step's work must not grow with graphs squared.
        self._of_layers: dict[PlannedGraph, list[PlannedGraph]] = {}
        self._only_recomputed: list[PlannedGraph] | None = None

    @property
    def is_given_a_peak(self) -> bool:
        """Whether the plan that the user gave was made under a peak budget: it says how backward gets each value."""
        return self._given is not None and self._given.peak_bytes is not None

    @property
    def live(self) -> list[PlannedGraph]:
        """The graphs that no newer one has replaced, in compile order."""
        return [graph for graph in self.all if not graph.is_replaced]

    @property
    def of_latest_step(self) -> list[PlannedGraph]:
        """The planned training graphs. Of several graphs for the same layers, only the one that ran last."""
        found: dict[object, PlannedGraph] = {}
        for graph in sorted(self.live, key=lambda graph: graph.ran_last):
            if graph.is_training and graph.plan is not None:
                found[graph.parameters.ids or graph.index] = graph
        return sorted(found.values(), key=lambda graph: graph.index)

    def drop(self) -> None:
        """Mark all graphs as dropped: a graph that is traced next takes over the state of the one that it replaces."""
        self._dropped = self.live
        self.shared_peak.forget()

    # Making graphs.

    def compiled(self, captured: Captured, args: Sequence[Any]) -> PlannedGraph:
        """Compile a graph for the layer whose parameters are among ``args``, and give it the state saved for it.

        Raises `PlanError` if the loaded state belongs to another graph.
        """
        identity = captured.identity
        for graph in () if identity.is_training else self.live:
            graph.finish_calibration()  # evaluation follows the plans of training
        dropped = saved_state.likeliest(identity, self._dropped, lambda g: g.captured.identity)
        old = next(iter(dropped), None)
        waiting = self._waiting.fitting(identity, [g.captured.identity for g in self.all])
        kept, mismatch = None if old is None else old.state_dict(), None
        for saved in waiting or ([] if kept is None else [SavedGraph(kept)]):
            try:
                graph = self._built(captured, args, saved)
            except PlanError as error:
                mismatch = error
            else:
                self._waiting.remove(saved)
                break
        else:
            if mismatch is not None and old is None:
                raise mismatch
            if mismatch is not None:
                old = None  # a graph of another model whose parameters have the same names
            graph = self._built(captured, args, None)
        if old is not None:
            old.retire()
            self._dropped.remove(old)
        self.all.append(graph)
        self.changed()
        return graph

    def changed(self) -> None:
        """Note that a graph was compiled or replaced, ran its first forward, or got other parameters."""
        self._of_layers.clear()
        self._only_recomputed = None

    def _built(self, captured: Captured, args: Sequence[Any], saved: SavedGraph | None) -> PlannedGraph:
        dump = None if self._dump is None else self._dump.graph(len(self.all))
        graph = PlannedGraph(captured, Parameters(captured.inputs, args, self.changed), self, dump)
        if self.binding is not None and captured.identity.is_training:
            graph.step_in_backward(self.binding, args)
        graph.compile(self._given_to(captured) if saved is None else saved.plan)
        if saved is not None and graph.controller is not None:
            graph.controller.load_state_dict(saved.state)
        return graph

    def _given_to(self, captured: Captured) -> Plan | None:
        """Return the user's plan, or None if this is an evaluation graph and the plan is of a training graph.

        Such an evaluation graph follows the plan's groups instead.
        """
        if self._given is None or (saved_state.is_of_training(self._given) and not captured.identity.is_training):
            return None
        return self._given

    # What one graph takes over from others.

    @property
    def only_recomputed(self) -> list[PlannedGraph]:
        """The training graphs that no call outside of backward has run so far, as under a reentrant checkpoint."""
        if self._only_recomputed is None:
            self._only_recomputed = [g for g in self.live if g.is_training and not g.runs_forward]
        return self._only_recomputed

    def training_of(self, own: PlannedGraph) -> list[PlannedGraph]:
        """Return the training graphs of the same layers, in compile order. One may be ``own``.

        There are several after a change of the batch size, for instance.
        """
        if own not in self._of_layers:
            training = [g for g in self.live if g.is_training and not g.parameters.of_another(own.parameters)]
            self._of_layers[own] = training
        return self._of_layers[own]

    @property
    def steps_of_training(self) -> int:
        """The largest number of steps that any training graph has run."""
        return max((graph.step for graph in self.live if graph.is_training), default=0)

    def training_plans(self, own: PlannedGraph) -> tuple[Plan, ...]:
        """Return the training plans that a graph may follow, the latest last; plans of other equal layers are left out.

        The plan of a file, and plans of loaded states whose graphs are not compiled yet, come first.
        """
        given = () if self._given is None or not saved_state.is_of_training(self._given) else (self._given,)
        plans = (graph.plan for graph in self.training_of(own))
        return (*given, *self._waiting.training_plans, *(plan for plan in plans if plan is not None))

    def share_promotions(self, own: PlannedGraph) -> None:
        """Promote what other training graphs of the same layers have promoted, such as graphs for other batch sizes."""
        controller = own.controller
        if controller is None or not own.is_training or controller.rules.promote_above is None:
            return
        for graph in self.training_of(own):
            theirs, pair = graph.controller, (own.index, graph.index)
            if theirs is None or graph is own or theirs.plan.gemms_by_name != controller.plan.gemms_by_name:
                continue
            theirs.catch_up()
            if self._taken.get(pair) is not theirs.plan:
                self._taken[pair] = theirs.plan
                controller.promote_as(theirs.plan, f"promoted in graph {graph.index}, of the same model")

    def share_scales(self, own: PlannedGraph) -> None:
        """Start with the scales of copies that other training graphs of the same layers have found."""
        for graph in self.training_of(own):
            theirs = graph.controller
            if own.controller is not None and theirs is not None and graph is not own:
                theirs.catch_up()
                own.controller.begin_with_scales(theirs)

    # Saved state.

    def states(self) -> list[GraphState | None]:
        """Return the states of all graphs, and the loaded states of graphs that are not compiled yet."""
        for graph in self.live:
            self.share_promotions(graph)
        return [*(g.state_dict() for g in self.live), *self._waiting.states]

    def load(self, states: Sequence[GraphState | None]) -> None:
        """Give each graph its saved state, and keep the other states for later graphs.

        Raises `PlanError` if a state does not fit its graph, before any graph is changed.
        """
        waiting = Waiting(states)
        found: list[tuple[PlannedGraph, SavedGraph]] = []
        earlier: list[Identity] = []
        for graph in sorted(self.live, key=lambda g: waiting.distance(g.captured.identity)):
            saved = _own_state(graph, waiting.fitting(graph.captured.identity, earlier))
            if saved is not None:
                found.append((graph, saved))
                waiting.remove(saved)
            earlier.append(graph.captured.identity)
        for graph, saved in found:
            graph.load_state(saved)
        self._waiting = waiting


def _own_state(graph: PlannedGraph, states: Sequence[SavedGraph]) -> SavedGraph | None:
    """Return the first of these states that fits ``graph``. Raises the last state's `PlanError` if none fits."""
    for saved in states:
        try:
            if graph.controller is not None:
                graph.controller.refuse_another(saved.state)
        except PlanError:
            if saved is states[-1]:
                raise
        else:
            return saved
    return None


class LayerDispatcher:
    """The callable that Dynamo gets for one capture: it dispatches to the graph of the layer whose parameters come in.

    Dynamo calls one function for all equal layers of one backend, but each layer has its own plan and scales. A layer
    not seen before compiles the capture once more; the code comes from AOTAutograd's cache if it may store the code. A
    capture without parameters cannot distinguish layers and has one graph.
    """

    def __init__(self, model: Model, captured: Captured, args: Sequence[Any]) -> None:
        self._model = model
        self._positions = [i for i, known in enumerate(captured.inputs) if known.kind == "param"]
        self._graphs = [model.compiled(captured, args)]
        self._last_of: weakref.WeakValueDictionary[int, PlannedGraph] = weakref.WeakValueDictionary()

    def __call__(self, *args: object) -> Any:
        """Run the graph whose parameters are among the arguments."""
        return self._of(args)(*args)

    def _of(self, args: Sequence[Any]) -> PlannedGraph:
        """Find the graph by identity of its parameters. A graph whose layer is freed serves the next new layer."""
        key = next((id(args[i]) for i in self._positions if isinstance(args[i], Parameter)), 0)
        likely = self._last_of.get(key, self._graphs[0])
        if likely.parameters.may_be(args):
            return likely
        with compat.compile_lock:  # another thread may call the same layer
            found = next((g for g in self._graphs if g.parameters.may_be(args)), None)
            if found is None:
                found = self._model.compiled(self._graphs[0].captured, args)
                self._graphs.append(found)
            self._last_of[key] = found
        return found
