"""Match gradients to values by a walk through the backward half of the joint graph in autograd's order.

Autograd leaves no node for an operator whose backward is the identity (a residual ``add``), and its sums over consumers
name no value. So the walk starts at the tangents, goes operator by operator, and traces each contribution to the value
that it is a gradient of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch.fx import Node

from fxprec.passes.analysis.groups import Grouped
from fxprec.passes.analysis.identities import Destinations
from fxprec.passes.analysis.values import is_plain_float

# Called for each contribution with (node, the value whose gradient it contributes to, its readers as such). Returns
# the node that replaces the contribution.
Visit = Callable[[Node, Node, list[Node]], Node]


class GradientWalk:
    """One walk over the operators in the order in which autograd ran their backward; ``visit`` may edit the graph."""

    def __init__(self, grouped: Grouped, visit: Visit) -> None:
        self.grouped, self.visit = grouped, visit
        self.operators = grouped.operators
        self.joint = grouped.operators.joint
        self.sums = self.operators.accumulations
        self.destinations = Destinations(self.operators)
        self.contributions: dict[Node, list[Node]] = {}  # value -> nodes that contribute to its gradient

    def run(self) -> None:
        """Walk from the outputs to the inputs, and visit each gradient that an operator's backward passes on."""
        self._start_at_tangents()
        for op in reversed(self.operators.all):
            if op.is_view:
                continue
            inside = set(op.backward)
            leaving = [n for n in op.backward if any(u not in inside for u in n.users)]
            if op.outputs and (summed := self.sum_of(op.outputs[0])) is not None:
                leaving.append(summed)  # passed on to inputs for which the operator's backward is the identity
            self._pass_on(op.inputs, leaving, inside)

    def _start_at_tangents(self) -> None:
        """Visit each tangent: the contribution of code outside the graph to the gradient of a returned value."""
        for tangent in self.joint.tangents:
            result = self.joint.returned_for(tangent)
            if result is not None:
                self._visit(tangent, self.operators.base(result), list(tangent.users))

    def _pass_on(self, inputs: Iterable[Node], leaving: Iterable[Node], inside: set[Node]) -> None:
        """Visit each gradient that leaves an operator's backward, once for each value that it belongs to."""
        values = list(dict.fromkeys(self.operators.base(n) for n in inputs))
        for node in leaving:
            users = [u for u in node.users if u not in inside]
            for target, taking in self.destinations.share(values, node, users).items():
                self._visit(node, target, taking)

    def _visit(self, node: Node, target: Node, users: list[Node]) -> None:
        tensor = self.grouped.grads.get(target)
        if (
            not users
            or (target.op == "placeholder" and tensor is None)
            or (tensor is not None and tensor.kind != "grad_output")
        ):
            return
        stands_for = node
        if tensor is not None and is_plain_float(node):
            stands_for = self.visit(node, target, users)
            self.destinations.follow(node, stands_for)
        self.contributions.setdefault(target, []).append(stands_for)

    def gradient_of(self, value: Node) -> Node | None:
        """Return the node that computes ``value``'s whole gradient, or None if there is none."""
        return self.joint.gradients[value][1] if value in self.joint.gradients else self.sum_of(value)

    def sum_of(self, value: Node) -> Node | None:
        """Return the node that sums all contributions to ``value``'s gradient, or None if there is none."""
        parts = self.contributions.get(value)
        if not parts:
            return None
        node, covered = parts[0], {parts[0]}
        while not covered.issuperset(parts):
            above = next((u for u in node.users if self._is_passive(u)), None)
            if above is None:
                return None
            node = above
            covered |= self._below(node, parts)
        return self._above_repeated(node, covered, value)

    def _above_repeated(self, node: Node, covered: set[Node], value: Node) -> Node:
        """Climb through sums that add a contribution again, as ``a + a``, to the highest that is ``value``'s."""
        highest = node
        while above := next((u for u in node.users if u in self.sums and covered.issuperset(u.all_input_nodes)), None):
            node = above
            covered.add(node)
            if self.destinations.is_whole(node, value):
                highest = node
        return highest

    def _below(self, node: Node, parts: Collection[Node]) -> set[Node]:
        """Return every node between ``node`` and ``parts``, both included, through sums and views."""
        found: set[Node] = set()
        stack = [node]
        while stack:
            n = stack.pop()
            found.add(n)
            if n not in parts and self._is_passive(n):
                stack.extend(a for a in n.all_input_nodes if a not in found)
        return found

    def _is_passive(self, node: Node) -> bool:
        owner = self.operators.of_backward_node.get(node)
        return node in self.sums or (owner is not None and owner.is_view)
