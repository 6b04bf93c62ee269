"""Equal layers of one backend: Dynamo calls one function for all of them, and each has plans and scales of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Parameter

from fxprec import compat
from fxprec.driver.graph import PlannedGraph
from fxprec.driver.parameters import Parameters


class Layers:
    """What Dynamo gets for a captured graph: calls the graph of the layer whose parameters come in.

    ``another`` compiles the same capture for a layer not seen before; its code is there already where AOTAutograd's
    cache may keep it. A capture without parameters cannot tell layers apart and has one graph.
    """

    def __init__(self, first: PlannedGraph, another: Callable[[Parameters], PlannedGraph]) -> None:
        self._graphs, self._another = [first], another
        self._names = Parameters.names_of(first.captured.inputs)
        self._last_of: weakref.WeakValueDictionary[int, PlannedGraph] = weakref.WeakValueDictionary()

    def __call__(self, *args: Any) -> Any:
        return self._of(args)(*args)

    def _of(self, args: Sequence[Any]) -> PlannedGraph:
        """Find the graph by identity of its parameters; one whose layer is gone serves the next that comes."""
        key = next((id(args[i]) for i in self._names if isinstance(args[i], Parameter)), 0)
        likely = self._last_of.get(key, self._graphs[0])
        if likely.parameters.may_be(args):
            return likely
        with compat.compile_lock:  # another thread may bring the same layer
            found = next((g for g in self._graphs if g.parameters.may_be(args)), None)
            if found is None:
                found = self._another(Parameters(self._names, args))
                self._graphs.append(found)
            self._last_of[key] = found
        return found
