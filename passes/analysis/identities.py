"""Follow gradients through sums, views and operators whose backward is the identity.

Autograd leaves no node for the backward of a residual ``add``. So a gradient that leaves an operator may reach the
backward of operators far above its inputs. To find the input that a gradient belongs to, its destinations are compared
with the destinations of each input's gradient. Paths are counted, not only their ends: in ``b = a + a; c = a + b`` the
gradients of a and of b end at the same operator, the latter by two paths.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Self, TypeAlias

from torch.fx import Node

from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import same_shape, tensor_of, value
from fxprec.passes.analysis.operators import Operator, Operators


@dataclass(frozen=True, slots=True)
class Ends:
    """A multiset of operators and graph inputs, in two ints: along a residual stream it would be as long as the model.

    ``mask`` has a bit for each member. ``paths`` adds a random weight of each member for each path that leads to it.
    Equal multisets have equal sums, and different multisets almost surely have not.
    """

    mask: int = 0
    paths: int = 0

    @classmethod
    def single(cls, index: int) -> Self:
        """Return the multiset that contains ``index`` once."""
        return cls(1 << index, random.Random(index).getrandbits(128))

    def plus(self, other: Ends) -> Ends:
        """Return the sum of two multisets, which adds each member's counts."""
        return Ends(self.mask | other.mask, (self.paths + other.paths) % (1 << 128))

    def times(self, count: int) -> Ends:
        """Return the multiset with each member's count multiplied by ``count``."""
        return Ends(self.mask, (self.paths * count) % (1 << 128))


NOWHERE = Ends()
Taker: TypeAlias = Operator | Node

# Most gradients have two candidate values and few users. With more combinations, each user gets the nearest value.
MAX_TRIES = 256


class Destinations:
    """Destinations of gradients in the joint graph's present state. Nodes inserted later lead nowhere."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self._single: dict[Operator | Node, Ends] = {op: Ends.single(op.id) for op in operators.all}
        for i, node in enumerate(operators.joint.gradients):
            self._single[node] = Ends.single(len(operators.all) + i)
        self._returned = self._gradients_returned()  # gradient -> the graph inputs it belongs to
        self._of_node: dict[Node, Ends] = {}
        self._climb()
        self._of_value: dict[Node, Ends] = {}

    def share(self, values: Sequence[Node], node: Node, users: Sequence[Node]) -> dict[Node, list[Node]]:
        """Return, by value, the ``users`` that read ``node`` as a gradient of that value.

        A gradient of one value belongs to that value with all users. If an ``add`` passes a gradient on to both inputs,
        the users are divided so that each input's part ends where that input's gradient ends.
        """
        takers = self._takers(node, users)
        takers = {t: found for t, found in takers.items() if any(self.of_value(v).mask & found.mask for v in values)}
        choice = self._exact_choice(values, takers) if len(values) > 1 else None
        if choice is None:
            choice = tuple(self._nearest(values, ends) for ends in takers.values())
        value_of = dict(zip(takers, choice, strict=True))
        parts: dict[Node, list[Node]] = {}
        for user in users:
            if (taker := self._taker(user)) in value_of:
                parts.setdefault(value_of[taker], []).append(user)
        return parts

    def _exact_choice(self, values: Sequence[Node], takers: Mapping[Taker, Ends]) -> tuple[Node, ...] | None:
        """Return a value for each taker, so that the takers of each value end exactly where its gradient ends."""
        if len(values) ** len(takers) > MAX_TRIES:
            return None
        for choice in product(values, repeat=len(takers)):
            totals: dict[Node, Ends] = {}
            for v, ends in zip(choice, takers.values(), strict=True):
                totals[v] = totals.get(v, NOWHERE).plus(ends)
            if all(total.paths == self.of_value(v).paths for v, total in totals.items()):
                return choice
        return None

    def _nearest(self, values: Sequence[Node], ends: Ends) -> Node:
        overlapping = [v for v in values if self.of_value(v).mask & ends.mask]
        return min(overlapping, key=lambda v: (self.of_value(v).mask ^ ends.mask).bit_count())

    def is_whole(self, node: Node, value: Node) -> bool:
        """Return whether ``node`` is the whole gradient of ``value``: its users lead where that gradient ends."""
        takers = self._takers(node, node.users, twice=True)
        return reduce(Ends.plus, takers.values(), NOWHERE).paths == self.of_value(value).paths

    def _takers(self, node: Node, users: Iterable[Node], *, twice: bool = False) -> dict[Taker, Ends]:
        """Return the takers of ``node`` and the destinations in each; ``twice`` counts ``node + node`` twice.

        An operator's backward may read a gradient in several nodes, but takes it once.
        """
        found: dict[Taker, Ends] = {}
        for user in users:
            times = max(user.args.count(node), 1) if twice and self._taker(user) is user else 1
            ends = self._returned if user.op == "output" else self._of_node
            found[self._taker(user)] = ends.get(node if user.op == "output" else user, NOWHERE).times(times)
        return found

    def _taker(self, user: Node) -> Taker:
        owner = self.operators.of_backward_node.get(user)
        return user if owner is None or owner.is_view else owner

    def follow(self, node: Node, new: Node) -> None:
        """Record that ``new`` replaces ``node``."""
        if node in self._returned:
            self._returned[new] = self._returned[node]

    def of_value(self, node: Node) -> Ends:
        """Return the destinations of a gradient of the forward value ``node``."""
        stack = [node]
        while stack:
            top = stack[-1]
            passed_on = [self.operators.base(n) for n in _identity_inputs(self.operators.of_node.get(top))]
            waiting = [n for n in passed_on if n not in self._of_value]
            if waiting:
                stack.extend(waiting)
                continue
            ends = self._own(top)
            for n in passed_on:
                ends = ends.plus(self._of_value[n])
            self._of_value[stack.pop()] = ends
        return self._of_value[node]

    def _own(self, node: Node) -> Ends:
        producer = self.operators.of_node.get(node)
        if producer is None:
            return self._single.get(node, NOWHERE)
        return self._single[producer] if producer.backward else NOWHERE

    def _gradients_returned(self) -> dict[Node, Ends]:
        found: dict[Node, Ends] = {}
        for node, (_, gradient) in self.operators.joint.gradients.items():
            found[gradient] = found.get(gradient, NOWHERE).plus(self._single[node])
        return found

    def _climb(self) -> None:
        """Compute, for each backward node, the operators or inputs whose gradient it becomes."""
        for node in reversed(list(self.operators.joint.backward_nodes())):
            owner = self.operators.of_backward_node.get(node)
            if owner is not None and not owner.is_view:
                self._of_node[node] = self._single[owner]
                continue
            takers = self._takers(node, (u for u in node.users if u.op != "output"), twice=True)
            self._of_node[node] = reduce(Ends.plus, takers.values(), self._returned.get(node, NOWHERE))


def _identity_inputs(op: Operator | None) -> list[Node]:
    """Return the inputs towards which the operator's backward is the identity, as often as they are read.

    An operator without backward nodes has the identity for all inputs; a sum has backward nodes only for an input that
    it broadcasts.
    """
    if op is None or (op.backward and op.aten not in ops.LINEAR_SUMS) or not op.outputs:
        return []
    read = [n for node in op.nodes for n in node.args if isinstance(n, Node) and n in op.inputs]
    if not op.backward:
        return read or op.inputs
    result = tensor_of(op.outputs[0])
    same = [n for n in read if (val := value(n)) is not None and same_shape(val, result)]
    return same[:1] if op.aten == "aten.sub" else same
