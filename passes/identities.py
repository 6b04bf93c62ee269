"""Where a gradient goes: through sums, views and operators whose backward is the identity.

Autograd leaves no node for the backward of a residual ``add``, so a gradient that leaves an operator may reach the
backward of operators far above its inputs. To find the input it belongs to, two things are compared: where its
users take it, and where a gradient of each input would be taken. Paths are counted, not only their ends: in
``b = a + a; c = a + b`` the gradients of a and of b end at the same operator, the latter by two paths.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Self

from torch.fx import Node

from fxprec.passes import ops
from fxprec.passes.joint import value
from fxprec.passes.operators import Operator, Operators


@dataclass(frozen=True, slots=True)
class Ends:
    """A multiset of operators and graph inputs, in two ints, since a residual stream makes it as long as the model.

    ``mask`` has a bit for each member. ``paths`` sums a random weight of each member as often as a path leads to
    it: equal multisets have equal sums, and others almost surely not.
    """

    mask: int = 0
    paths: int = 0

    @classmethod
    def single(cls, index: int) -> Self:
        return cls(1 << index, random.Random(index).getrandbits(128))

    def plus(self, other: Ends) -> Ends:
        return Ends(self.mask | other.mask, (self.paths + other.paths) % (1 << 128))

    def times(self, count: int) -> Ends:
        return Ends(self.mask, (self.paths * count) % (1 << 128))


NOWHERE = Ends()

# An operator passes one gradient on to two inputs and few users; above this, each user goes to the nearest value.
MAX_TRIES = 256


class Destinations:
    """Destinations in the joint graph as it is now; nodes inserted later are unknown and lead nowhere."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self._single: dict[Operator | Node, Ends] = {op: Ends.single(op.id) for op in operators.all}
        for i, node in enumerate(operators.joint.gradients):
            self._single[node] = Ends.single(len(operators.all) + i)
        self._returned = self._gradients_returned()  # gradient -> the graph inputs it belongs to
        self._of_node = self._climb()
        self._of_value: dict[Node, Ends] = {}

    def share(self, values: Sequence[Node], node: Node, users: Sequence[Node]) -> dict[Node, list[Node]]:
        """Return, by value, the ``users`` that take ``node`` as a gradient of it.

        A gradient of one value goes to all of its users; one that an ``add`` passes on to both of its inputs is
        shared out so that each input's part ends where that input's gradient ends.
        """
        ends = {user: self._ends(node, user) for user in users}
        users = [user for user in users if any(self.of_value(v).mask & ends[user].mask for v in values)]
        if len(values) > 1 and len(values) ** len(users) <= MAX_TRIES:
            for choice in product(values, repeat=len(users)):
                parts: dict[Node, list[Node]] = {}
                for user, v in zip(users, choice, strict=True):
                    parts.setdefault(v, []).append(user)
                if all(self._total(ends[u] for u in part).paths == self.of_value(v).paths for v, part in parts.items()):
                    return parts
        nearest: dict[Node, list[Node]] = {}
        for user in users:
            overlapping = [v for v in values if self.of_value(v).mask & ends[user].mask]
            v = min(overlapping, key=lambda v: (self.of_value(v).mask ^ ends[user].mask).bit_count())
            nearest.setdefault(v, []).append(user)
        return nearest

    def is_whole(self, node: Node, value: Node) -> bool:
        """Say whether the users of ``node`` take it where a gradient of ``value`` ends: it is that gradient."""
        total = self._total(self._ends(node, u).times(max(u.args.count(node), 1)) for u in node.users)
        return total.paths == self.of_value(value).paths

    def _ends(self, node: Node, user: Node) -> Ends:
        return self._returned.get(node, NOWHERE) if user.op == "output" else self._of_node.get(user, NOWHERE)

    @staticmethod
    def _total(ends: Iterable[Ends]) -> Ends:
        return reduce(Ends.plus, ends, NOWHERE)

    def follow(self, node: Node, new: Node) -> None:
        """Note that ``new`` now stands where ``node`` stood."""
        if node in self._returned:
            self._returned[new] = self._returned[node]

    def of_value(self, node: Node) -> Ends:
        """Return where a gradient of the forward value ``node`` ends."""
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

    def _climb(self) -> dict[Node, Ends]:
        """Return, by backward node, the operators or inputs whose gradient it becomes."""
        found: dict[Node, Ends] = {}
        for node in reversed(list(self.operators.joint.backward_nodes())):
            owner = self.operators.of_backward_node.get(node)
            if owner is not None and not owner.is_view:
                found[node] = self._single[owner]
                continue
            ends = self._returned.get(node, NOWHERE)
            for user in node.users:
                ends = ends.plus(found.get(user, NOWHERE).times(max(user.args.count(node), 1)))
            found[node] = ends
        return found


def _identity_inputs(op: Operator | None) -> list[Node]:
    """Return the inputs, as often as they are read, through which the backward is the identity.

    Where an operator has no backward nodes these are all; a sum that broadcasts one input has nodes for that one.
    """
    if op is None or (op.backward and op.aten not in ops.LINEAR_SUMS) or not op.outputs:
        return []
    read = [n for node in op.nodes for n in node.args if isinstance(n, Node) and n in op.inputs]
    if not op.backward:
        return read or op.inputs
    result = value(op.outputs[0])
    assert result is not None
    same = [n for n in read if (val := value(n)) is not None and val.shape == result.shape]
    return same[:1] if op.aten == "aten.sub" else same
