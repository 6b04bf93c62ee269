"""Model the ways of all values, and the values' demands on each other, as a mixed-integer problem.

Backward gets each forward value that it needs in one way. The value is kept in one of its forms (`passes.forms`), or
recomputed, either from exact operands or from operands that may be rounded. A recomputation needs its operands, in
forms that tolerate it. Without bounds on the bytes that are live at each moment this is a minimum cut. So the relaxed
problem's solution has few fractions: HiGHS solves the relaxed problem, and then searches these fractions.
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
from fxprec.passes.analysis.joint import is_view_or_cast, readers, tensor_of, value
from fxprec.passes.analysis.replay.kernels import Kind, is_square, kind_of, result_bytes
from fxprec.passes.analysis.ways import FROM_EXACT, FROM_ROUNDED, LOW, Demand, Form, Recompute, Way
from fxprec.passes.crossings.costs import Rates
from fxprec.passes.crossings.effort import Effort
from fxprec.passes.crossings.needs import Needs
from fxprec.passes.crossings.repeats import groups_of
from fxprec.passes.forms.own import Own

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint
    from scipy.sparse import csr_array

# Kinds that may be recomputed without the option 'recompute', because Inductor repeats them by itself.
_CHEAP = (Kind.FUSED, Kind.VIEW, Kind.FREE, Kind.PIECE)
_SEARCHED = 30  # branch-and-bound nodes of one search
_WIDE = 500  # columns of one search; in a larger problem equal blocks share columns
EXACT, ROUGHLY = 1e-3, 0.05
"""Relative optimality gaps: of the choice that is made, and of choices that are only reported."""
WHOLE = 1e-6
_AMPLIFIED = 1.75  # most by which a recomputation may enlarge the errors of 8-bit copies
_LITTLE = 1e-9  # seconds added to each way, so that among equal choices the one that does less wins

Row = tuple[Mapping[int, float], float, float]
"""Coefficients by column, and the lower and the upper limit of their sum."""
Ways = Mapping[Node, Way]
_Vector = npt.NDArray[np.float64]


@dataclass
class Problem:
    """A column for each way of each value, and the rows that every choice must satisfy."""

    needs: Needs
    rates: Rates
    allowed: Collection[str]
    hides_copies: bool = False
    """Whether copies to host memory are assumed to overlap with kernels in full. False: not at all."""
    effort: Effort = field(default_factory=Effort)
    price: float = 0.0
    """Seconds that each saved byte on the device costs, if no peak budget limits the bytes."""
    is_bounded: bool = True
    """Whether a budget bounds the bytes: a recomputation may then enlarge errors, and be the source of others."""
    inputs: Collection[Node] = ()
    """Inputs that backward keeps alive only if a value is recomputed from them. Otherwise the caller may free them."""

    def __post_init__(self) -> None:
        self._allowed = frozenset(self.allowed)
        self._sources: dict[Node, frozenset[Node]] = {}
        self._seconds: dict[tuple[Node, Way], float] = {}
        self.nodes = self._closure()
        keys = [(node, way) for node in self.nodes for way in self._allowed_ways(node)]
        self.columns = {key: column for column, key in enumerate(keys)}
        self._by_node: dict[Node, dict[Way, int]] = {node: {} for node in self.nodes}
        for (node, way), column in self.columns.items():
            self._by_node[node][way] = column
        self.cost = np.array([self.seconds(node, way) for node, way in keys])
        self.rows = list(self._required())
        self._tied = self._ties(keys)

    def _ties(self, keys: Sequence[tuple[Node, Way]]) -> csr_array:
        """Return the matrix from few columns to all columns, in which equal values of equal blocks share their way."""
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
        """Return a key of a value. Values with equal keys may share their way."""
        val = value(node)
        shape = None if val is None else (str(val.dtype), *map(str, val.shape))
        return node.target, shape, tuple(self.ways(node)), node in self.needs.read_high, node in self.needs.read_low

    def _closure(self) -> list[Node]:
        """Return the values that backward or a recomputation may need, in graph order."""
        found, stack = set[Node](), [*self.needs.read_high, *self.needs.read_low]
        while stack:
            node = stack.pop()
            if not self._needs_no_way(node) and node not in found:
                found.add(node)
                stack += self.sources(node)
        return [n for n in self.needs.step.forward if n in found]

    def sources(self, node: Node) -> frozenset[Node]:
        """Return the values that a recomputation of ``node`` needs."""
        if node not in self._sources:
            operands = {self.needs.step.undecoded(n) for n in node.all_input_nodes}
            if node in self.needs.comparisons:
                operands = set(map(self._shown, operands))
            self._sources[node] = frozenset(n for n in operands if not self._needs_no_way(n))
        return self._sources[node]

    def _shown(self, node: Node) -> Node:
        """Return the value that views and casts of it show."""
        while is_view_or_cast(node):
            node = self.needs.step.undecoded(node.all_input_nodes[0])
        return node

    def _needs_no_way(self, node: Node) -> bool:
        step = self.needs.step
        return (step.needs_no_saving(node) or node in step.checkpointed) and node not in self.inputs

    def ways(self, node: Node) -> Collection[Way]:
        """Return the ways of a value, those first that serve the most recomputations."""
        return self._by_node[node].keys()

    def _allowed_ways(self, node: Node) -> Iterator[Way]:
        if node in self.inputs or node in self.needs.forced:
            yield Own() if node in self.inputs else self.needs.forced[node]
            return
        if regions.backward_recomputes(node):
            return  # it has no way, because a need for it would recompute its whole region
        yield from (form for form in self.needs.forms.get(node, ()) if form.options <= self._allowed)
        if self.needs.can_repeat(node) and ("recompute" in self._allowed or kind_of(node) in _CHEAP):
            yield FROM_EXACT
            if self._bears_rounded_sources(node):
                yield FROM_ROUNDED

    def _bears_rounded_sources(self, node: Node) -> bool:
        """Return whether backward may read a value that is recomputed from rounded ones; within a budget mostly.

        Not where it is a difference that may cancel. Without a budget, not where its sign is a factor of the gradient,
        as that of ``abs``, nor where the recomputation enlarges errors, as a square does.
        """
        if node in self.needs.comparisons:
            return True  # from a kept copy, see `_must_be_kept`
        if self.needs.may_cancel(node):
            return False
        if self.is_bounded:
            return not (self.price and is_square(node))
        if node not in self.needs.read_low:
            return True  # of a value that backward does not read, what is recomputed from it decides
        return node not in self.needs.step.compared and self.needs.amplification(node) <= _AMPLIFIED

    def demand(self, node: Node) -> Demand | None:
        """Return the demand that backward's own nodes have on a value, or None."""
        if node in self.needs.read_high:
            return Demand.READ
        return Demand.READ_LOW if node in self.needs.read_low else None

    def narrowest(self, node: Node) -> Form:
        """Return the form of fewest bytes that serves a value's readers in backward; repeated nodes do not count."""
        demand = self.demand(node)
        forms = [way for way in self.ways(node) if isinstance(way, Form) and not way.is_on_host]
        return min((f for f in forms if demand is None or demand in f.serves), key=lambda form: self.size(node, form))

    def completed(self, kept: Ways) -> Ways | None:
        """Return a choice that keeps the values in ``kept`` where it can, and recomputes all other needed values.

        A value is kept unrounded if its way does not serve its demands, or if it cannot be recomputed. None if that is
        not allowed.
        """
        demands, ways = defaultdict[Node, set[Demand]](set), dict[Node, Way]()
        for node in self.nodes:
            demands[node] = {demand} if (demand := self.demand(node)) is not None else set()
        for node in reversed(self.nodes):
            if not demands[node]:
                continue
            way = kept.get(node, FROM_ROUNDED if demands[node] <= LOW else FROM_EXACT)
            if not demands[node] <= way.serves or (node, way) not in self.columns:
                way = next(iter(self.ways(node)), FROM_EXACT)
                if not isinstance(way, Own):
                    return None
            if isinstance(way, Recompute) and any(
                source not in kept and self._must_be_kept(source, node, way) for source in self.sources(node)
            ):
                way = next(iter(self.ways(node)))
                if isinstance(way, Recompute):
                    return None
            ways[node] = way
            if isinstance(way, Recompute):
                for source in self.sources(node):
                    demands[source].add(way.demand)
        return ways

    def faster_than(self, seconds: float) -> Row:
        """Return the row that limits a choice to ``seconds``."""
        return dict(enumerate(self.cost.tolist())), -np.inf, seconds

    def size(self, node: Node, form: Form) -> int:
        """Return the bytes of a kept value; for a value in host memory, the bytes that it takes on the device."""
        return form.num_bytes(tensor_of(node))

    def seconds(self, node: Node, way: Way) -> float:
        """Return the seconds that a way of a value costs."""
        if (node, way) not in self._seconds:
            self._seconds[node, way] = self._cost_of(node, way)
        return self._seconds[node, way]

    def _cost_of(self, node: Node, way: Way) -> float:
        if isinstance(way, Recompute):
            written = 0 if self.is_bounded else self._operand_bytes(node)
            return self.rates.running(node) + self.rates.writing(written) + _LITTLE
        size = self.size(node, way)
        moving = self.moving(size) if way.is_on_host else self.price * size
        return (
            self.rates.keeping(size, is_there=self._is_there(node, way))
            + self.rates.encoding(node, way)
            + moving
            + _LITTLE
        )

    def _is_there(self, node: Node, form: Form) -> bool:
        """Return whether a value is in memory anyway, as a library's kernel writes it, or reads it in forward."""
        if kind_of(node) is Kind.FUSED:
            read = (reader for _, reader in readers(node) if reader not in self.needs.step.backward_set)
            return (
                not self.is_bounded and form.format is None and any(kind_of(reader) is Kind.EXTERN for reader in read)
            )
        return self.is_bounded or form.format is None

    def _operand_bytes(self, node: Node) -> int:
        """Return the bytes that a recomputation writes to memory, since a library's kernel reads them in backward."""
        step = self.needs.step
        copies = [decoded for q in step.stored.get(node, ()) for decoded in q.users]
        read = (pair for x in (node, *copies) for pair in readers(x, is_view_or_cast) if pair[1] in step.backward_set)
        return max((result_bytes(operand) for operand, reader in read if kind_of(reader) is Kind.EXTERN), default=0)

    def moving(self, size: int) -> float:
        """Return the assumed seconds to move ``size`` bytes to the host and back, before `overlap` computes them."""
        return 2 * self.rates.call_s if self.hides_copies else self.rates.moving(size)

    def _required(self) -> Iterator[Row]:
        """Yield the rows that make backward's values available, and the operands of recomputed values."""
        for node in self.nodes:
            yield self._serving(node, None), -np.inf, 1.0
            if node in self.inputs:
                continue
            if (demand := self.demand(node)) is not None:
                yield self._serving(node, demand), 1.0, np.inf
            for way in (FROM_EXACT, FROM_ROUNDED):
                if (node, way) in self.columns:
                    for source in sorted(self.sources(node)):  # in a fixed order, so that ties break the same way
                        serving = self._serving(source, way.demand, kept=self._must_be_kept(source, node, way))
                        yield serving | {self.columns[node, way]: -1.0}, 0.0, np.inf

    def _must_be_kept(self, source: Node, node: Node, way: Recompute) -> bool:
        """Return whether ``node`` is recomputed in this way only from a kept copy of ``source``.

        A kept copy is on its value's side of the number that a comparison compares it with; a value that is recomputed
        from rounded ones may not be.

        Without a budget there are no chains of values that backward reads. In a residual network each would be computed
        from the one before, so all of them at the start of backward.
        """
        if node in self.needs.comparisons:
            return way is FROM_ROUNDED and source not in self.needs.comparisons
        return not self.is_bounded and self._is_read(source) and any(map(self._is_read, self._computed_from(source)))

    def _is_read(self, node: Node) -> bool:
        """Return whether backward reads a result that can be recomputed, a view or a cast left out."""
        return self._can_repeat(node) and self.demand(node) is not None and not is_view_or_cast(node)

    def _can_repeat(self, node: Node) -> bool:
        return node in self._by_node and any(isinstance(way, Recompute) for way in self.ways(node))

    def _computed_from(self, node: Node) -> set[Node]:
        """Return what a recomputation of a value may compute, up to values that backward reads."""
        found, stack = set[Node](), [node]
        while stack:
            new = {n for n in self.sources(stack.pop()) if self._can_repeat(n)} - found
            found |= new
            stack += (n for n in new if not self._is_read(n))
        return found

    def _serving(self, node: Node, demand: Demand | None, *, kept: bool = False) -> dict[int, float]:
        """Return the columns of the ways that serve a demand, or all columns; ``kept``: of forms alone."""
        ways = {way: at for way, at in self._by_node[node].items() if not (kept and isinstance(way, Recompute))}
        return {at: 1.0 for way, at in ways.items() if demand is None or demand in way.serves}

    def solve(self, bounds: Sequence[Row], gap: float = EXACT) -> Ways | None:
        """Return the ways of least cost within ``bounds``, or None; ``gap`` is the relative distance allowed."""
        from scipy.sparse import eye_array

        if not self.columns:
            return {}
        constraints = constraints_of([*self.rows, *bounds], len(self.columns))
        relaxed = self._relaxed(constraints)
        if relaxed is None:
            return None
        # Fix the whole numbers of the relaxed solution. If that is infeasible or costs more, also try tied blocks.
        found, open_ways = None, int((np.abs(relaxed - np.round(relaxed)) > WHOLE).sum())
        if open_ways <= _WIDE:
            found = self._searched(constraints, eye_array(len(self.cost)).tocsr(), relaxed, gap)
        least = float(self.cost @ relaxed)
        if (found is None or self.cost @ found > (1 + gap) * least) and self.effort.take_search(self._tied.shape[1]):
            rivals = [x for x in (found, self._searched(constraints, self._tied, None, gap)) if x is not None]
            found = min(rivals, key=lambda x: float(self.cost @ x), default=None)
        if found is None:
            return None
        return {node: way for (node, way), column in self.columns.items() if found[column] > 0.5}

    def _relaxed(self, constraints: LinearConstraint) -> _Vector | None:
        """Return the relaxed solution of least cost, with fractions."""
        from scipy.optimize import Bounds, milp

        bounds = Bounds(np.zeros(len(self.cost)), np.ones(len(self.cost)))
        answer = milp(self.cost * self.scale, constraints=constraints, bounds=bounds)
        found: _Vector | None = answer.x
        return found

    def _searched(
        self, constraints: LinearConstraint, tied: csr_array, near: _Vector | None, gap: float
    ) -> _Vector | None:
        """Return a solution in whole numbers; ``near`` fixes the columns that are whole in it."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        matrix: Any = constraints.A
        size = tied.shape[1]
        least, most = (
            (np.zeros(size), np.ones(size)) if near is None else (np.floor(near + WHOLE), np.ceil(near - WHOLE))
        )
        answer = milp(
            self.cost @ tied * self.scale,
            constraints=LinearConstraint(matrix @ tied, constraints.lb, constraints.ub),
            integrality=np.ones(size, dtype=np.int64),
            bounds=Bounds(least, most),
            options={"node_limit": _SEARCHED, "mip_rel_gap": gap},
        )
        self.effort.searched(answer.mip_node_count or 0)
        return None if answer.x is None else tied @ answer.x

    @property
    def scale(self) -> float:
        """The factor that the solver's costs have."""
        return 1e3 / max(float(self.cost.sum()), 1e-30)  # brings them into the range of HiGHS's tolerances


def constraints_of(rows: Sequence[Row], size: int) -> LinearConstraint:
    """Return rows as the solver takes them, for ``size`` columns."""
    from scipy.optimize import LinearConstraint  # imported here: takes 0.5 s, which a start from the cache saves
    from scipy.sparse import coo_array

    # Scale each row so that its largest coefficient is 1; a row of empty tensors stays as it is.
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
