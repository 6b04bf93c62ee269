"""Which node is whose gradient: the backward half of the joint graph, read as autograd ran it.

Autograd leaves no trace of an operator whose backward is the identity (a residual ``add``), and sums consumers in
anonymous additions. So the gradients are walked from the tangents, operator by operator, each contribution traced
to the value it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Node

from fxprec.passes.groups import Grouped
from fxprec.passes.operators import Operator

# Called for each contribution as (node, the value whose gradient it adds to, the users that take it as such);
# returns the node that stands for the contribution from now on.
Visit = Callable[[Node, Node, list[Node]], Node]


class GradientWalk:
    """One walk over the operators in the order autograd ran their backward; ``visit`` may edit the graph."""

    def __init__(self, grouped: Grouped, visit: Visit) -> None:
        self.grouped, self.visit = grouped, visit
        self.operators = grouped.operators
        self.joint = grouped.operators.joint
        self.sums = self.operators.accumulations
        self.input_gradients = {grad for _, grad in self.joint.gradients.values()}
        self.contributions: dict[Node, list[Node]] = {}  # value -> contributions, as they stand in the graph

    def run(self) -> None:
        self._start_at_tangents()
        for op in reversed(self.operators.all):
            if op.is_view:
                continue
            if op.backward:
                inside = set(op.backward)
                leaving = [n for n in op.backward if any(u not in inside for u in n.users)]
                self._pass_on(op, leaving, inside)
            elif op.outputs:
                summed = self.sum_of(op.outputs[0])
                if summed is not None:
                    self._pass_on(op, [summed], set())

    def _start_at_tangents(self) -> None:
        """A tangent is the contribution of the code outside the graph to the value it returned."""
        returned = self.joint.results[: self.joint.num_forward_outputs]
        for i, tangent in enumerate(self.joint.tangents):
            position = getattr(getattr(tangent.meta.get("desc"), "output", None), "idx", i)
            result = returned[position] if position < len(returned) else None
            if isinstance(result, Node):
                self._visit(tangent, self.operators.base(result), list(tangent.users))

    def _pass_on(self, op: Operator, leaving: Iterable[Node], inside: set[Node]) -> None:
        """Visit what ``op``'s backward passes on, once per value it belongs to."""
        inputs = list(dict.fromkeys(self.operators.base(n) for n in op.inputs))
        for node in leaving:
            belongs: dict[Node, list[Node]] = {}
            for user in node.users:
                if user in inside or (user.op == "output" and node not in self.input_gradients):
                    continue
                ends = self._ends(user, node)
                target = next((v for v in inputs if self._reaches(v, ends)), None)
                if target is not None:
                    belongs.setdefault(target, []).append(user)
            for target, users in belongs.items():
                self._visit(node, target, users)

    def _visit(self, node: Node, target: Node, users: list[Node]) -> None:
        tensor = self.grouped.grads.get(target)
        if users and tensor is not None and tensor.kind == "grad_output":
            self.contributions.setdefault(target, []).append(self.visit(node, target, users))

    def _ends(self, user: Node, via: Node) -> frozenset[Operator | Node]:
        """Climb sums and views from ``user`` to the operators, or inputs, whose gradient it becomes."""
        found: set[Operator | Node] = set()
        seen: set[Node] = set()
        stack = [(user, via)]
        while stack:
            node, source = stack.pop()
            if node.op == "output":
                found.update(p for p, (_, grad) in self.joint.gradients.items() if grad is source)
                continue
            owner = self.operators.of_backward_node.get(node)
            if owner is not None and not owner.is_view:
                found.add(owner)
            elif node not in seen:
                seen.add(node)
                stack.extend((u, node) for u in node.users)
        return frozenset(found)

    def _reaches(self, value: Node, ends: frozenset[Operator | Node]) -> bool:
        """Say whether ``value``'s gradient arrives at one of ``ends``, through identity backwards too."""
        stack, seen = [value], set()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            producer = self.operators.of_node.get(node)
            if producer is None:
                if node in ends:
                    return True
            elif producer.backward:
                if producer in ends:
                    return True
            else:
                stack.extend(self.operators.base(n) for n in producer.inputs)
        return False

    def sum_of(self, value: Node) -> Node | None:
        """Return the node that sums all contributions to ``value``'s gradient, or None where none is seen."""
        parts = self.contributions.get(value)
        if not parts:
            return None
        node, covered = parts[0], {parts[0]}
        while not covered.issuperset(parts):
            above = next((u for u in node.users if self._is_passive(u)), None)
            if above is None:
                return None
            node = above
            covered |= self._below(node)
        return node

    def _below(self, node: Node) -> set[Node]:
        """Return every node below ``node`` through sums and views."""
        found: set[Node] = set()
        stack = [node]
        while stack:
            n = stack.pop()
            found.add(n)
            if self._is_passive(n):
                stack.extend(a for a in n.all_input_nodes if a not in found)
        return found

    def _is_passive(self, node: Node) -> bool:
        owner = self.operators.of_backward_node.get(node)
        return node in self.sums or (owner is not None and owner.is_view)
