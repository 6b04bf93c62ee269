"""Find stored copies that may have any error of mean 0, because all gradients then keep their mean.

Backward is linear in the gradients that pass through it. A copy with errors of mean 0, independent of all others, keeps
the mean of every gradient that is linear in the copy. A gradient is linear in the copy under two conditions. The copy
is only moved, scaled and added to other values. Each result is multiplied by values that do not depend on the copy.
Weight gradients, products, norms but for one term, and attention's values and result are linear in this sense. If two
factors computed from the copy are multiplied, the square of the error stays. That is allowed if one factor is a sum
over so many elements that the error's share of the sum is small (a norm's backward: x * sum(g x)).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec.ir.operators import Trait, having
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import JointGraph, is_view, made_by, numel_hint, value

_SUMS = having(Trait.SUMS)
_HANDS_ON = having(Trait.HANDS_ON_VALUES)
_FACTORS = ("value", "out")  # arguments of attention's backward that it is linear in, beside the gradient


def averaged_over(bits: int) -> int:
    """Return the shortest sum whose squared error at ``bits`` is below 1/1000 of the values that it is added to.

    Values that span 7 standard deviations, rounded at random, have an error variance of at most (7 / (2^bits - 1))^2 /
    4 of theirs.
    """
    return 1 << (14 - 2 * bits) if bits < 7 else 1


@dataclass(frozen=True)
class Order:
    """The nodes of a joint graph by position, and those that depend on a tangent."""

    at: Mapping[Node, int]
    of_tangents: Collection[Node]
    """The tangents and the nodes that depend on one."""

    @classmethod
    def of(cls, joint: JointGraph) -> Order:
        """Number the nodes, and collect those that depend on a tangent."""
        return cls({node: i for i, node in enumerate(joint.graph.nodes)}, joint.made_of_tangents())

    def biased_by(self, copies: Collection[Node], bits: int, exempt: Collection[Node] = ()) -> Node | None:
        """Return the first reader in which errors of a copy, or of values computed from it, do not average out.

        None if they average out in all. ``copies`` are the nodes that decode one stored copy. Readers in ``exempt`` get
        another value instead.
        """
        return _Walk(self, averaged_over(bits), set(exempt)).first_biased(copies)


@dataclass
class _Walk:
    """A walk from a copy to all nodes that depend on it, in graph order."""

    order: Order
    least: int
    exempt: Collection[Node]

    def __post_init__(self) -> None:
        self.summed: dict[Node, int] = {}  # dependent node -> elements that its errors are averaged over, at least
        self.last = -1  # position of the last reader of a dependent value that depends on no gradient
        self.ahead: list[tuple[int, Node]] = []

    def first_biased(self, copies: Collection[Node]) -> Node | None:
        for copy in copies:
            self._add(copy, 1)
        seen = set[Node]()
        while self.ahead:
            at, node = heapq.heappop(self.ahead)
            if at > self.last:  # only gradients are left, in which backward is linear
                return None
            if node in seen or node in self.exempt or node.op == "output":
                continue
            seen.add(node)
            if not self._is_linear(node):
                return node
            self._add(node, min(self.summed[n] for n in node.all_input_nodes if n in self.summed) * _terms_summed(node))
        return None

    def _add(self, node: Node, summed: int) -> None:
        self.summed[node] = summed
        for user in node.users:
            heapq.heappush(self.ahead, (self.order.at[user], user))
            if node not in self.order.of_tangents:
                self.last = max(self.last, self.order.at[user])

    def _is_linear(self, node: Node) -> bool:
        dependent = {i for i, nodes in _operands(node) if any(n in self.summed for n in nodes)}
        terms = _terms(node)
        if not dependent <= {i for term in terms for i in term}:
            return False
        return all(self._is_linear_in(node, dependent.intersection(term)) for term in terms)

    def _is_linear_in(self, node: Node, factors: Collection[int]) -> bool:
        """Return whether at most one factor of a product has errors of the copy that are not averaged over many."""
        nodes = [n for i, found in _operands(node) if i in factors for n in found if n in self.summed]
        return len(factors) < 2 or sum(self.summed[n] < self.least for n in nodes) < 2


def _operands(node: Node) -> Iterator[tuple[int, list[Node]]]:
    for i, arg in enumerate(node.args):
        nodes: list[Node] = []
        torch.fx.map_arg(arg, nodes.append)
        yield i, nodes


def _terms(node: Node) -> ops.Terms:
    """Return the products of arguments whose sum a node computes, as in `ops.TERMS`."""
    if node.target in _HANDS_ON:
        return ((0,), (1,))
    if is_view(node) or made_by(node) is not node:
        return ((0,),)
    if node.target is ops.aten.convolution_backward.default:
        return ((0, 1), (0, 2))
    if node.target in ops.ATTENTION_BACKWARD:
        assert isinstance(node.target, torch._ops.OpOverload)
        names = [argument.name for argument in node.target._schema.arguments]
        return ((0,), *((0, names.index(name)) for name in _FACTORS))
    return ops.TERMS.get(node.target, ())


def _terms_summed(node: Node) -> int:
    """Return the number of operand elements that a sum adds for each element of its result; 1 for other nodes."""
    val, source = value(node), value(node.all_input_nodes[0])
    if node.target not in _SUMS or val is None or source is None:
        return 1
    return max(numel_hint(source) // max(numel_hint(val), 1), 1)
