"""Where a gradient goes: through sums, views and operators whose backward is the identity.

Autograd leaves no node for the backward of a residual ``add``, so a gradient that leaves an operator may reach the
backward of operators far above its inputs. To find the input it belongs to, two things are compared: where its
users take it, and where a gradient of each input would be taken. Paths are counted, not only their ends: in
``b = a + a; c = a + b`` the gradients of a and of b end at the same operator, the latter by two paths.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
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

    def plus(self, other: Self, times: int = 1) -> Self:
        return type(self)(self.mask | other.mask, (self.paths + times * other.paths) % (1 << 128))

    def distance(self, other: Self) -> tuple[bool, int]:
        return self.paths != other.paths, (self.mask ^ other.mask).bit_count()


NOWHERE = Ends()


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

    def choose(self, values: Iterable[Node], node: Node, user: Node) -> Node | None:
        """Return the value whose gradient ``node`` is where ``user`` takes it, or None."""
        ends = self._returned.get(node, NOWHERE) if user.op == "output" else self._of_node.get(user, NOWHERE)
        reached = [v for v in values if self.of_value(v).mask & ends.mask]
        return min(reached, key=lambda v: self.of_value(v).distance(ends), default=None)

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
                ends = ends.plus(found.get(user, NOWHERE), max(user.args.count(node), 1))
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
