"""Pass 4 for ``simulate`` storage: every counted tensor is rounded, exactly as the paper defines it.

ALGORITHMS 3, "Where rounding happens": a parameter once a step; an output after its operator; the gradient of a
value once per consumer, in the format of that value's gradient, and not again after the consumers are summed; a
parameter's gradient once before it leaves the graph.

Autograd leaves no trace of an operator whose backward is the identity (a residual ``add``), and sums consumers in
anonymous additions. So the gradients are walked as autograd walked them: from the tangents, operator by operator,
each contribution traced to the value it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxprec.passes import ops
from fxprec.passes.groups import Grouped
from fxprec.passes.operators import Operator
from fxprec.passes.sites import SiteBook, insertion_point_after, replace_uses
from fxprec.passes.tensors import CountedTensor
from torch.fx import Node


def insert_simulated_casts(grouped: Grouped, book: SiteBook) -> None:
    """Round every counted tensor of the joint graph in place."""
    walk = _GradientWalk(grouped, book)  # reads the graph as autograd left it
    walk.run()
    _round_values(grouped, book)
    _round_parameter_gradients(grouped, book)


def _round_values(grouped: Grouped, book: SiteBook) -> None:
    made_by = grouped.operators.of_node
    for node, tensor in grouped.values.items():
        inside = set(made_by[node].nodes) if node in made_by else set()
        users = [u for u in node.users if u not in inside and u.target not in ops.MUTATIONS]
        with book.graph.inserting_before(insertion_point_after(node).next):
            q, x = book.store(node, tensor)
        replace_uses(node, x, [u for u in users if u is not q])


def _round_parameter_gradients(grouped: Grouped, book: SiteBook) -> None:
    joint = grouped.operators.joint
    results = list(joint.results)
    for node, (position, _) in joint.gradients.items():
        tensor = grouped.grads.get(node)
        gradient = results[position]
        if tensor is None or tensor.kind != "grad_param" or not isinstance(gradient, Node):
            continue
        with book.graph.inserting_before(joint.output):
            _, results[position] = book.store(gradient, tensor, backward=True)
    joint.output.args = (type(joint.results)(results),)  # type: ignore[call-arg]


class _GradientWalk:
    """One walk over the operators in the order autograd ran their backward."""

    def __init__(self, grouped: Grouped, book: SiteBook) -> None:
        self.grouped, self.book = grouped, book
        self.operators = grouped.operators
        self.joint = grouped.operators.joint
        self.sums = self.operators.accumulations
        # value -> rounded contributions to its gradient, as they stand in the graph
        self.contributions: dict[Node, list[Node]] = {}
        self.order = {node: i for i, node in enumerate(self.joint.graph.nodes)}

    def run(self) -> None:
        self._seed()
        for op in reversed(self.operators.all):
            if op.is_view:
                continue
            if op.backward:
                inside = set(op.backward)
                leaving = [n for n in op.backward if any(u not in inside for u in n.users)]
                self._round(op, leaving, inside)
            elif op.outputs:
                summed = self._sum_of(op.outputs[0])
                if summed is not None:
                    self._round(op, [summed], set())

    def _seed(self) -> None:
        """A tangent is the contribution of the code outside the graph to the value it returned."""
        returned = [n for n in self.joint.results[: self.joint.num_forward_outputs] if isinstance(n, Node)]
        by_position = dict(zip(self._tangent_positions(), self.joint.tangents, strict=False))
        for position, tangent in by_position.items():
            if position < len(returned):
                base = self.operators.base(returned[position])
                if base in self.grouped.grads:
                    self._insert(tangent, base, list(tangent.users))

    def _tangent_positions(self) -> list[int]:
        """Return which output each tangent belongs to."""
        positions = []
        for i, tangent in enumerate(self.joint.tangents):
            output = getattr(tangent.meta.get("desc"), "output", None)
            positions.append(getattr(output, "idx", i))
        return positions

    def _round(self, op: Operator, leaving: Iterable[Node], inside: set[Node]) -> None:
        """Round what ``op``'s backward passes on, once per value it belongs to."""
        inputs = list(dict.fromkeys(self.operators.base(n) for n in op.inputs))
        for node in leaving:
            belongs: dict[Node, list[Node]] = {}
            for user in node.users:
                if user in inside or (user.op == "output" and not self._is_input_gradient(node)):
                    continue
                target = next((v for v in inputs if self._reaches(v, self._terminals(user, node))), None)
                if target is not None and target in self.grouped.grads:
                    belongs.setdefault(target, []).append(user)
            for target, users in belongs.items():
                if self.grouped.grads[target].kind == "grad_output":
                    self._insert(node, target, users)

    def _insert(self, node: Node, target: Node, users: list[Node]) -> None:
        tensor: CountedTensor = self.grouped.grads[target]
        if not users:
            return
        with self.book.graph.inserting_before(insertion_point_after(node).next):
            q, rounded = self.book.store(node, tensor, backward=True)
        replace_uses(node, rounded, [u for u in users if u is not q])
        self.contributions.setdefault(target, []).append(rounded)

    def _is_input_gradient(self, node: Node) -> bool:
        return any(grad is node for _, grad in self.joint.gradients.values())

    def _terminals(self, user: Node, via: Node) -> frozenset[Operator | Node]:
        """Climb sums and views from ``user`` to the operators, or inputs, whose gradient it becomes."""
        found: set[Operator | Node] = set()
        stack = [(user, via)]
        seen: set[Node] = set()
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

    def _reaches(self, value: Node, terminals: frozenset[Operator | Node]) -> bool:
        """Say whether ``value``'s gradient arrives at one of ``terminals``, through identity backwards too."""
        if value.op == "placeholder":
            return value in terminals
        producer = self.operators.of_node.get(value)
        if producer is None:
            return False
        if producer.backward:
            return producer in terminals
        return any(self._reaches(self.operators.base(n), terminals) for n in producer.inputs)

    def _sum_of(self, value: Node) -> Node | None:
        """Return the node that sums all contributions to ``value``'s gradient."""
        parts = self.contributions.get(value)
        if not parts:
            return None
        node = parts[0]
        covered = {node}
        while not set(parts) <= covered:
            above = next((u for u in node.users if u in self.sums or self._is_view(u)), None)
            if above is None:
                return None
            node = above
            covered |= self._leaves(node)
        return node

    def _leaves(self, node: Node) -> set[Node]:
        """Return every node below ``node`` through sums and views."""
        found, stack = set(), [node]
        while stack:
            n = stack.pop()
            found.add(n)
            if n in self.sums or self._is_view(n):
                stack.extend(a for a in n.all_input_nodes if a not in found)
        return found

    def _is_view(self, node: Node) -> bool:
        owner = self.operators.of_backward_node.get(node)
        return owner is not None and owner.is_view
