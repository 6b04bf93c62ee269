"""The ways that each value may go, and what they ask of each other, as a mixed-integer problem.

Each value of forward that backward needs is there in one way: kept in one of its forms (`passes.forms`), or computed
again from what is itself exact, or from what may be rounded. Computing it again asks for its operands, in forms that
bear it. That is a minimum cut but for bounds on what lives at each moment, so the relaxed problem is nearly whole:
HiGHS solves that, and then searches the few fractions that are left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from fxprec.passes.analysis import regions
from fxprec.passes.analysis.joint import tensor_of, value
from fxprec.passes.analysis.replay.kernels import Kind, can_repeat, is_square, kind_of
from fxprec.passes.analysis.ways import AGAIN, LOW, ROUNDED, Again, Demand, Form, Way
from fxprec.passes.crossings.costs import Rates
from fxprec.passes.crossings.needs import Needs
from fxprec.passes.crossings.progress import Progress
from fxprec.passes.crossings.repeats import groups_of
from fxprec.passes.forms.own import Own

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint
    from scipy.sparse import csr_array

# Repeated where nothing may be computed again, too: Inductor does so by itself.
_CHEAP = (Kind.FUSED, Kind.VIEW, Kind.FREE, Kind.PIECE)
_SEARCHED = 30  # nodes of one search
_WIDE = 500  # columns of one: above, equal blocks go the same ways
_EFFORT = 3_000  # columns of all searches that answer one question
_REPLAYED = 200_000  # items of all choices that are replayed to lower a peak
EXACT, ROUGHLY = 1e-3, 0.05
"""Relative gaps: of the choice that is made, and of those that are only shown."""
_WHOLE = 1e-6
_LITTLE = 1e-9  # seconds: of equals, the choice that does less

Row = tuple[Mapping[int, float], float, float]
"""Coefficients by column, and the least and the most that their sum may be."""
Ways = Mapping[Node, Way]
_Vector = npt.NDArray[np.float64]


@dataclass
class Effort:
    """The work that one search may still take, counted and not timed, so that every process finds the same choice."""

    columns: int = _EFFORT
    items: int = _REPLAYED
    searches: int = 0
    """Calls of HiGHS in whole numbers, since the problem was made."""
    nodes: int = 0

    progress: Progress = field(default_factory=Progress)

    def renew(self) -> None:
        """Allow as much search and as many replays as at the start."""
        self.columns = _EFFORT
        self.renew_replays()

    def renew_replays(self) -> None:
        """Allow as many replays as at the start; the work left for searches stays."""
        self.items = _REPLAYED

    def searched(self, nodes: int) -> None:
        """Count one search of so many branch-and-bound nodes, and show the counts."""
        self.searches += 1
        self.nodes += nodes
        self.progress.show(f"planning what backward gets: search {self.searches}, {self.nodes} nodes")

    def replay(self, items: int) -> bool:
        """Take ``items`` off the work that is left; say whether a choice of so many items may be replayed."""
        self.items -= items
        return self.items >= 0

    def take(self, columns: int) -> bool:
        """Take a search of so many columns off the work that is left, or return False where it is too large."""
        if columns > self.columns:
            return False
        self.columns -= columns
        return True


@dataclass
class Problem:
    """A column for each way of each value, and the rows that every choice obeys."""

    needs: Needs
    rates: Rates
    allowed: Collection[str]
    hides_copies: bool = False
    """Whether copies to host memory are taken to run beside kernels in full, or not at all."""
    effort: Effort = field(default_factory=Effort)
    price: float = 0.0
    """Seconds that a byte on the device is worth, where no bound says so."""
    inputs: Collection[Node] = ()
    """Inputs that backward holds only if something is computed again from them: the caller may let them go."""

    def __post_init__(self) -> None:
        self._allowed = frozenset(self.allowed)
        self.nodes = self._closure()
        keys = [(node, way) for node in self.nodes for way in self._allowed_ways(node)]
        self.columns = {key: column for column, key in enumerate(keys)}
        self._by_node: dict[Node, dict[Way, int]] = {node: {} for node in self.nodes}
        for (node, way), column in self.columns.items():
            self._by_node[node][way] = column
        self.cost = np.array([self.seconds(node, way) for node, way in keys])
        self._rows = list(self._required())
        self._tied = self._ties(keys)

    def _ties(self, keys: Sequence[tuple[Node, Way]]) -> csr_array:
        """Return the matrix from few columns to all columns: equal values of equal blocks go the same way."""
        from scipy.sparse import csr_array

        most = _WIDE * len(self.nodes) // max(len(keys), 1)
        groups = groups_of(len(self.nodes), [self.trait(node) for node in self.nodes], most)
        at = {node: self.nodes[group] for node, group in zip(self.nodes, groups, strict=True)}
        wide = len(keys) > _WIDE
        columns: dict[tuple[Node, Way], int] = {}
        places = [columns.setdefault((at[node] if wide else node, way), len(columns)) for node, way in keys]
        shape = len(keys), len(columns)
        return csr_array((np.ones(len(keys)), (range(len(keys)), places)), shape=shape)

    def trait(self, node: Node) -> Hashable:
        """Return a key: values with equal keys may go the same way."""
        val = value(node)
        shape = None if val is None else (str(val.dtype), *map(str, val.shape))
        return node.target, shape, tuple(self.ways(node)), node in self.needs.exactly, node in self.needs.roughly

    def _closure(self) -> list[Node]:
        """Return the values that may be asked for in backward, in order."""
        found, stack = set[Node](), [*self.needs.exactly, *self.needs.roughly]
        while stack:
            node = stack.pop()
            if not self._is_there(node) and node not in found:
                found.add(node)
                stack += self.sources(node)
        return [n for n in self.needs.step.forward if n in found]

    def sources(self, node: Node) -> set[Node]:
        """Return the values that computing a value again asks for."""
        shown = {self.needs.step.shown(n) for n in node.all_input_nodes}
        return {n for n in shown if not self._is_there(n)}

    def _is_there(self, node: Node) -> bool:
        step = self.needs.step
        return (step.is_there(node) or node in step.again) and node not in self.inputs

    def ways(self, node: Node) -> Collection[Way]:
        """Return the ways that a value may go; first the forms from which most other values may be computed again."""
        return self._by_node[node].keys()

    def _allowed_ways(self, node: Node) -> Iterator[Way]:
        if node in self.inputs or node in self.needs.kept:
            yield Own() if node in self.inputs else self.needs.kept[node]
            return
        if regions.runs_again(node):
            return  # not there, and nothing is to ask for it: a whole region would run for it
        yield from (form for form in self.needs.forms.get(node, ()) if form.options <= self._allowed)
        if can_repeat(node) and ("recompute" in self._allowed or kind_of(node) in _CHEAP):
            yield AGAIN
            # Of a rounded value a square has twice the error, which no bound asks for.
            if not (self.price and is_square(node)):
                yield ROUNDED

    def demand(self, node: Node) -> Demand | None:
        """Return the demand of backward's own nodes on a value, or None."""
        if node in self.needs.exactly:
            return Demand.READ
        return Demand.READ_LOW if node in self.needs.roughly else None

    def narrowest(self, node: Node) -> Form:
        """Return the form of fewest bytes that serves a value's readers in backward, repeated nodes left out."""
        asked = self.demand(node)
        forms = [way for way in self.ways(node) if isinstance(way, Form) and not way.is_on_host]
        return min((f for f in forms if asked is None or asked in f.bears), key=lambda form: self.size(node, form))

    def completed(self, kept: Ways) -> Ways | None:
        """Return a choice that keeps values as ``kept`` says where it can, and computes all other needed values again.

        A value that is needed exactly, or cannot be computed again, is kept unrounded; None where it cannot be kept.
        """
        asked, ways = defaultdict[Node, set[Demand]](set), dict[Node, Way]()
        for node in self.nodes:
            asked[node] = {demand} if (demand := self.demand(node)) is not None else set()
        for node in reversed(self.nodes):
            if not asked[node]:
                continue
            way = kept.get(node, ROUNDED if asked[node] <= LOW else AGAIN)
            if not asked[node] <= way.bears or (node, way) not in self.columns:
                way = next(iter(self.ways(node)), AGAIN)
                if not isinstance(way, Own):
                    return None
            ways[node] = way
            if isinstance(way, Again):
                for source in self.sources(node):
                    asked[source].add(way.asks)
        return ways

    def faster_than(self, seconds: float) -> Row:
        """Return the row of the choices that take at most ``seconds``."""
        return dict(enumerate(self.cost.tolist())), -np.inf, seconds

    def size(self, node: Node, form: Form) -> int:
        """Return the bytes of a kept value; for a value in host memory, its bytes while it is on the device."""
        return form.num_bytes(tensor_of(node))

    def seconds(self, node: Node, way: Way) -> float:
        """Return the seconds that a way of a value costs."""
        if isinstance(way, Again):
            return self.rates.again(node) + _LITTLE
        size = self.size(node, way)
        rounding = self.rates.rounding(node, way) if way.is_rounded else 0.0
        moving = self.moving(size) if way.is_on_host else self.price * size
        return self.rates.keeping(node, size) + rounding + moving + _LITTLE

    def moving(self, size: int) -> float:
        """Return the assumed seconds to move ``size`` bytes to host memory and back, before `overlap` knows them."""
        return 2 * self.rates.call_s if self.hides_copies else self.rates.moving(size)

    def _required(self) -> Iterator[Row]:
        """Yield rows: values that backward needs must be there, and so must the sources of repeated values."""
        for node in self.nodes:
            yield self._bearing(node, None), -np.inf, 1.0
            if node in self.inputs:
                continue
            if (asked := self.demand(node)) is not None:
                yield self._bearing(node, asked), 1.0, np.inf
            for way in (AGAIN, ROUNDED):
                if (node, way) in self.columns:
                    for source in sorted(self.sources(node)):  # of equal choices, the same one every time
                        yield self._bearing(source, way.asks) | {self.columns[node, way]: -1.0}, 0.0, np.inf

    def _bearing(self, node: Node, asked: Demand | None) -> dict[int, float]:
        """Return the columns of the ways that serve a demand; all columns where there is none."""
        return {at: 1.0 for way, at in self._by_node[node].items() if asked is None or asked in way.bears}

    def solve(self, bounds: Sequence[Row], gap: float = EXACT) -> Ways | None:
        """Return the ways of least cost within ``bounds``, or None; ``gap``: how far from the least it may be."""
        from scipy.sparse import eye_array

        if not self.columns:
            return {}
        constraints = _constraints([*self._rows, *bounds], len(self.columns))
        relaxed = self._relaxed(constraints)
        if relaxed is None:
            return None
        # What the relaxed problem leaves whole stays; where that is not within bounds, or dear, equal blocks are one.
        found, open_ways = None, int((np.abs(relaxed - np.round(relaxed)) > _WHOLE).sum())
        if open_ways <= _WIDE:
            found = self._searched(constraints, eye_array(len(self.cost)).tocsr(), relaxed, gap)
        least = float(self.cost @ relaxed)
        if (found is None or self.cost @ found > (1 + gap) * least) and self.effort.take(self._tied.shape[1]):
            rivals = [x for x in (found, self._searched(constraints, self._tied, None, gap)) if x is not None]
            found = min(rivals, key=lambda x: float(self.cost @ x), default=None)
        if found is None:
            return None
        return {node: way for (node, way), column in self.columns.items() if found[column] > 0.5}

    def _relaxed(self, constraints: LinearConstraint) -> _Vector | None:
        """Return the ways of least cost in fractions."""
        from scipy.optimize import Bounds, milp

        bounds = Bounds(np.zeros(len(self.cost)), np.ones(len(self.cost)))
        answer = milp(self.cost * self._scale, constraints=constraints, bounds=bounds)
        found: _Vector | None = answer.x
        return found

    def _searched(
        self, constraints: LinearConstraint, tied: csr_array, near: _Vector | None, gap: float
    ) -> _Vector | None:
        """Return ways in whole numbers; with ``near`` those alone that leave its whole numbers as they are."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        matrix: Any = constraints.A
        size = tied.shape[1]
        least, most = (
            (np.zeros(size), np.ones(size)) if near is None else (np.floor(near + _WHOLE), np.ceil(near - _WHOLE))
        )
        answer = milp(
            self.cost @ tied * self._scale,
            constraints=LinearConstraint(matrix @ tied, constraints.lb, constraints.ub),
            integrality=np.ones(size, dtype=np.int64),
            bounds=Bounds(least, most),
            options={"node_limit": _SEARCHED, "mip_rel_gap": gap},
        )
        self.effort.searched(answer.mip_node_count or 0)
        return None if answer.x is None else tied @ answer.x

    @property
    def _scale(self) -> float:
        return 1e3 / max(float(self.cost.sum()), 1e-30)  # to a size that HiGHS's tolerances are made for


def _constraints(rows: Sequence[Row], size: int) -> LinearConstraint:
    from scipy.optimize import LinearConstraint  # 0.5 s, which a plan from the cache does not wait for
    from scipy.sparse import coo_array

    # In units in which the largest coefficient of a row is 1; empty tensors have no bytes.
    units = [max(map(abs, entries.values()), default=1.0) or 1.0 for entries, _, _ in rows]
    where = [
        (row, column, weight / units[row])
        for row, (entries, _, _) in enumerate(rows)
        for column, weight in entries.items()
    ]
    row, column, weight = zip(*where, strict=True)
    matrix = coo_array((weight, (row, column)), shape=(len(rows), size)).tocsr()
    bounds = np.array([(least, most) for _, least, most in rows]) / np.array(units)[:, None]
    return LinearConstraint(matrix, bounds[:, 0], bounds[:, 1])
