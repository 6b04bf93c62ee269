"""The ``torch.compile`` entry: ``backend="fxprec"`` or ``backend=fxprec.Backend(config)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from fxprec import capture, compat
from fxprec.config import Config
from fxprec.errors import FxprecError
from fxprec.graph import PlannedGraph
from fxprec.plan import Plan
from fxprec.runtime.events import Event


class Backend:
    """A ``torch.compile`` backend with its own plans, statistics and events.

    One backend serves every graph of one model: Dynamo calls it once per captured graph.
    """

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self._graphs: list[PlannedGraph] = []

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return self._compile(gm, example_inputs)
        except FxprecError as error:
            raise compat.through_dynamo(error) from error

    def _compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if not self.config.changes_anything or not example_inputs:
            return compat.compile_fx(gm, example_inputs)  # type: ignore[no-any-return]
        captured = capture.Captured.take(gm, example_inputs)
        try:
            graph = PlannedGraph(captured, self.config, len(self._graphs), None)
        except capture.TableFull as full:
            graph = PlannedGraph(captured.with_capacity(full.sites), self.config, len(self._graphs), None)
        self._graphs.append(graph)
        return graph

    @property
    def plans(self) -> tuple[Plan, ...]:
        """One plan per compiled training graph, in compile order."""
        return tuple(g.plan for g in self._graphs if g.is_training and g.plan is not None)

    @property
    def events(self) -> tuple[Event, ...]:
        """Promotions, scale changes, fallbacks: (step, kind, site, detail), oldest first."""
        found = [e for g in self._graphs for e in (*g.events, *(g.controller.events if g.controller else ()))]
        return tuple(sorted(found, key=lambda e: e.step))

    def stats(self) -> list[dict[str, Any]]:
        """One row per site with its latest statistics; waits for those still on their way."""
        rows = []
        for graph in self._graphs:
            if graph.controller is not None:
                rows += [{"graph": graph.index, **row} for row in graph.controller.rows()]
        return rows


def fxprec(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """The backend behind the string ``"fxprec"``; its options are the fields of `Config`."""
    wrapper = compat.calling_wrapper()
    backend = getattr(wrapper, "fxprec_backend", None)
    if backend is None:
        backend = Backend(Config.from_options(options))
        if wrapper is not None:
            wrapper.fxprec_backend = backend  # type: ignore[attr-defined]
    return backend(gm, example_inputs)
