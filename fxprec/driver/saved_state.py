"""Write and read the saved state of a backend: two fixed keys, whatever was compiled, and every entry type-checked.

``torch.distributed.checkpoint`` loads only into existing keys, and a fresh backend has no graphs yet. So the states of
all graphs are one text, which ``torch.save``, JSON and distributed checkpoints can all store. A checkpoint is an
untrusted file, so the whole state is checked before any of it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar

from fxprec.errors import PlanError
from fxprec.plan import Plan
from fxprec.plan.files import read_checked
from fxprec.plan.reading import Entry, Reader, each, fields_of, flag, integer, or_one_of, text
from fxprec.runtime.controller_state import plan_of

VERSION = 3
_READABLE = (2, VERSION)  # version 2 had a list of dicts instead of the text

GraphState = Mapping[str, Any]
T = TypeVar("T")
Shape: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True)
class Identity:
    """Facts that identify a graph of a model before it is traced, as after a restart evaluation may come first."""

    is_training: bool
    parameters: tuple[str, ...] | None  # names in call order; None in a state of version 2
    inputs: tuple[Shape, ...] = ()
    """Dtype and sizes of each input but parameters and buffers, in call order; -1: dynamic. Empty in older states."""

    @classmethod
    def of(cls, state: GraphState) -> Identity:
        """Return the identity of a saved state's graph."""
        found = state.get("graph")
        if found is None:
            return cls(is_of_training(plan_of(state)), None)
        return cls(found["training"], tuple(found["parameters"]), tuple(map(tuple, found.get("inputs", ()))))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        found = {"training": self.is_training, "parameters": list(self.parameters or ())}
        return found | {"inputs": [list(shape) for shape in self.inputs]}

    def fits(self, other: Identity) -> bool:
        """Return whether both have the same parameters, if these are known, and both train or both do not."""
        known = None not in (self.parameters, other.parameters)
        return self.is_training == other.is_training and (not known or self.parameters == other.parameters)

    def distance(self, other: Identity) -> int:
        """Return how far the inputs are from another graph's: 0 equal, 1 equal but for dynamic sizes, 2 different."""
        if self.inputs == other.inputs:
            return 0
        if [*map(len, self.inputs)] != [*map(len, other.inputs)]:
            return 2
        pairs = ((a, b) for x, y in zip(self.inputs, other.inputs, strict=True) for a, b in zip(x, y, strict=True))
        return 1 if all(a == b or -1 in (a, b) for a, b in pairs) else 2


@dataclass(frozen=True)
class SavedGraph:
    """A loaded state that waits for its graph."""

    state: GraphState

    @cached_property
    def plan(self) -> Plan:
        """The saved plan. Raises `PlanError` if it cannot be read."""
        return plan_of(self.state)

    @cached_property
    def identity(self) -> Identity:
        """The identity of the saved graph."""
        return Identity.of(self.state)


class Waiting:
    """The loaded states whose graphs are not compiled yet."""

    def __init__(self, states: Iterable[GraphState | None] = ()) -> None:
        self._saved = [SavedGraph(state) for state in states if state is not None]

    def fitting(self, wanted: Identity, earlier: Iterable[Identity]) -> list[SavedGraph]:
        """Return the states that may belong to a graph, the likeliest first; comparing plans decides which one does.

        If none fits a training graph, return the first training state, whose error explains the difference. This does
        not apply to a graph like one of the ``earlier`` graphs: it is that graph traced again.
        """
        found = likeliest(wanted, self._saved, lambda saved: saved.identity)
        if found or not wanted.is_training or any(e.fits(wanted) for e in earlier):
            return found
        return [saved for saved in self._saved if saved.identity.is_training][:1]

    def distance(self, wanted: Identity) -> int:
        """Return the least `Identity.distance` of a fitting state, 3 if none: the closest graph chooses first."""
        fitting = (saved.identity for saved in self._saved if saved.identity.fits(wanted))
        return min((identity.distance(wanted) for identity in fitting), default=3)

    def remove(self, saved: SavedGraph) -> None:
        """Remove a state that its graph has taken."""
        self._saved = [other for other in self._saved if other is not saved]

    @property
    def states(self) -> tuple[GraphState, ...]:
        """The states whose graphs are not compiled yet."""
        return tuple(saved.state for saved in self._saved)

    @property
    def training_plans(self) -> tuple[Plan, ...]:
        """Plans that evaluation follows until a training graph is compiled."""
        return tuple(saved.plan for saved in self._saved if saved.identity.is_training)


def likeliest(wanted: Identity, given: Iterable[T], identity: Callable[[T], Identity]) -> list[T]:
    """Return the items of ``given`` that fit a graph, sorted by the distance of their inputs."""
    fitting = [x for x in given if identity(x).fits(wanted)]
    return sorted(fitting, key=lambda x: identity(x).distance(wanted))


def is_of_training(plan: Plan) -> bool:
    """Return whether a plan belongs to a graph with a backward half."""
    return any(site.direction == "backward" for site in plan.sites)


def packed(graphs: Sequence[GraphState | None]) -> dict[str, Any]:
    """Return ``{"version": 3, "graphs": <JSON text>}`` from one state per graph; a state may be None."""
    return {"version": VERSION, "graphs": json.dumps(list(graphs))}


def unpacked(state: object) -> list[GraphState | None]:
    """Return one state per graph from a result of `packed`, or from a state of version 2. Raises `PlanError`."""
    if not isinstance(state, Mapping) or state.get("version") not in _READABLE:
        raise PlanError(f"this is not a state of fxprec.Backend version {VERSION}; {_WAY_OUT}")
    graphs = state.get("graphs")
    if isinstance(graphs, str):
        try:
            graphs = json.loads(graphs)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"the saved state is damaged: its graphs are not JSON ({error}); {_WAY_OUT}") from error
    if not isinstance(graphs, list) or not all(g is None or isinstance(g, Mapping) for g in graphs):
        raise PlanError(f"the saved state is damaged: its graphs are not a list of states; {_WAY_OUT}")
    for i, saved in enumerate(graphs):
        if saved is not None:
            check_graph(Entry(saved, f"graphs[{i}]", _WAY_OUT))
    return graphs


_WAY_OUT = "pass what state_dict() returned"
_LARGEST_EXP = 1_000  # exponents of scales; float32 holds less
_LARGEST = 2**53
_count = integer(0, _LARGEST, "2**53")
_exponent = integer(-_LARGEST_EXP, _LARGEST_EXP, str(_LARGEST_EXP))


def _number(entry: Entry) -> float:
    if type(entry.value) not in (int, float) or not abs(entry.value) <= _LARGEST**4:
        raise entry.wrong("a finite number")
    return float(entry.value)


def _size(entry: Entry) -> object:
    """Read a dtype's name, a size, or -1 for a dynamic size."""
    return entry.value if isinstance(entry.value, str) or entry.value == -1 else _count(entry)


def _rows(read: Reader) -> Reader:
    """Return a reader of a JSON object whose keys are rows of the scale table, as decimal text."""

    def read_all(entry: Entry) -> None:
        for key in entry.mapping():
            if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10):
                raise entry.fail(f"has the key {key!r:.60}, which is not a row of the table", _WAY_OUT)
            read(entry.get(key))

    return read_all


def _statistics(number: Reader) -> Reader:
    names = ("overflow_ratio", "underflow_ratio", "amax", "rms", "nonzero_ratio", "mean_ln", "std_ln")
    return fields_of({"site": _count, **dict.fromkeys(names, number), "counts": each(_number)})


def _scales(entry: Entry) -> None:
    """Read the scales of single casts, or a loss scale, which has the additional counter "good_steps"."""
    of_loss = isinstance(entry.value, Mapping) and "good_steps" in entry.value
    fields_of(_SCALES, _SCALES.keys() - (_OF_LOSS if of_loss else _OF_EACH))(entry)


_OF_LOSS = {"exps", "overflowed", "seen", "good_steps"}
_OF_EACH = {"exps", "measured", "amax", "margins", "saturating", "fresh", "due", "settling", "last_refresh"}
_SCALES: Mapping[str, Reader] = {
    "exps": each(_exponent),
    "measured": each(_statistics(_number)),
    "amax": _rows(_number),
    "margins": _rows(_exponent),
    "saturating": _rows(_number),
    "clipped": _rows(_exponent),
    "recent": _rows(each(_number)),
    "small": _rows(_count),
    "fresh": each(_count),
    "due": flag,
    "settling": _count,
    "last_refresh": _count,
    "in_force_since": _count,
    "overflowed": flag,
    "seen": flag,
    "good_steps": _count,
}
_COPY = fields_of(
    {
        "exp": _exponent,
        "was": _exponent,
        "since": _count,
        "empty_since": or_one_of([None], _count),
        "recent": each(_number),
        "floor": _exponent,
    },
    ("floor",),
)
_IDENTITY: Mapping[str, Reader] = {"training": flag, "parameters": each(text), "inputs": each(each(_size))}
_PENDING = fields_of(
    {
        "step": or_one_of([None], _count),
        "statistics": each(_statistics(or_one_of(["inf", "-inf", "nan"], _number))),
    }
)
check_graph = fields_of(
    {
        "step": _count,
        "scales": or_one_of([None], _scales),
        "copies": _rows(_COPY),
        "plan": partial(read_checked, kind=Plan),
        "pending": each(_PENDING),
        "refused": each(_count),
        "graph": fields_of(_IDENTITY, ("inputs",), unread=None),
    },
    ("copies", "pending", "refused", "graph"),
    unread=None,
)
