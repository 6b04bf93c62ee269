"""Move comparisons of forward values from backward to forward, so that a comparison's result may be what is saved.

The gradient of a maximum goes to the larger operand, and half of it to each operand where they are equal. Numbers less
than 6 % apart often have equal copies in e4m3fn. The gradient of an intersection over union, a product of differences
of maxima, was off by 100 %. Backward reads the result of such a comparison instead: one bit an element, and exact.

A ReLU's backward compares a value with a number. Backward may repeat such a comparison where it has a copy of the
value: keep-signs keeps copies on their side of that number. Elsewhere the result is saved, in an eighth of the bytes of
an 8-bit copy (`passes.forms.bits`). choose-crossings chooses.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from fxprec.ir.operators import Trait, having
from fxprec.passes.analysis import ops, regions
from fxprec.passes.analysis.joint import JointGraph, argument, operator_of, value
from fxprec.passes.analysis.replay.kernels import Kind, kind_of
from fxprec.passes.base import Pass, Work
from fxprec.passes.sites import emit, replace_node

_ORDERS = having(Trait.ORDERS)
_EQUALITIES = frozenset({ops.aten.eq.Tensor, ops.aten.ne.Tensor})
_TESTS = having(Trait.TESTS_ABOVE) | having(Trait.TESTS_BELOW)


@dataclass(frozen=True)
class CompareInForward(Pass):
    """Move backward's comparisons of forward values to forward, and what combines their results.

    Two tensors' equality is moved if their order is compared as well. Fill ``work.comparisons``.
    """

    name: str = "compare-in-forward"

    def apply(self, work: Work) -> None:
        moves = _Moves(work.joint)
        for node in list(work.joint.backward_nodes()):
            operands = moves.pair(node) or moves.tested(node) or moves.combined(node)
            if operands:
                moves.move(node, operands)
        work.comparisons |= moves.of_numbers


@dataclass
class _Moves:
    """The comparisons of one joint graph that move to forward."""

    joint: JointGraph
    made: dict[tuple[object, ...], Node] = field(default_factory=dict)
    of_numbers: set[Node] = field(default_factory=set)
    """Moved comparisons with a number, and what combines such alone."""

    def __post_init__(self) -> None:
        self.last = {node.meta["seq_nr"]: node for node in self.joint.forward_nodes() if "seq_nr" in node.meta}
        pairs = ((node, self._both(node)) for node in self.joint.backward_nodes())
        self.ordered = {frozenset(both) for node, both in pairs if node.target in _ORDERS}

    def pair(self, node: Node) -> tuple[Node, ...]:
        """Return the two forward values whose order a backward node compares; else no nodes."""
        is_moved = node.target in _ORDERS or (
            node.target in _EQUALITIES and frozenset(self._both(node)) in self.ordered
        )
        return self._both(node) if is_moved else ()

    def _both(self, node: Node) -> tuple[Node, ...]:
        if node.target not in _ORDERS | _EQUALITIES:
            return ()
        both = tuple(x for x in node.args if isinstance(x, Node) and not self.joint.in_backward(x))
        return both if len(both) == 2 else ()

    def tested(self, node: Node) -> tuple[Node, ...]:
        """Return the forward value that a backward node compares with a number; else no nodes.

        Comparisons of a value that a checkpointed region recomputes stay behind that region.
        """
        if node.target not in _TESTS or not _is_boolean(node) or not isinstance(argument(node, 1), int | float):
            return ()
        source = node.all_input_nodes[0]
        while source.target in ops.ALIASES:
            source = source.all_input_nodes[0]
        return () if self.joint.in_backward(source) or regions.backward_recomputes(source) else (source,)

    def combined(self, node: Node) -> tuple[Node, ...]:
        """Return the operands of a node that combines moved comparisons alone, element by element; else no nodes."""
        operands = tuple(node.all_input_nodes)
        is_of_moved = set(operands) <= {*self.made.values()} and len(operands) == len(node.args)
        return operands if is_of_moved and _is_boolean(node) and kind_of(node) is Kind.FUSED else ()

    def move(self, node: Node, operands: tuple[Node, ...]) -> None:
        """Replace a backward node by a forward node behind its operands, as part of the same operator."""
        key = node.target, operands, *(x for x in node.args if not isinstance(x, Node))
        if key not in self.made:
            self.made[key] = self._emitted(node, operands)
        replace_node(node, self.made[key])

    def _emitted(self, node: Node, operands: Collection[Node]) -> Node:
        args = (*operands, *node.args[len(operands) :])
        like = self.last.get(node.meta.get("seq_nr"), max(operands))
        with node.graph.inserting_after(max(*operands, like)):
            moved = emit(node.graph, operator_of(node), args, like, backward=False, val=node.meta["val"])
        if "original_aten" in like.meta:
            moved.meta["original_aten"] = like.meta["original_aten"]
        if "seq_nr" in moved.meta:
            last = self.last.get(moved.meta["seq_nr"], moved)
            self.last[moved.meta["seq_nr"]] = max(moved, last)
        if node.target in _TESTS or (node.target not in _ORDERS | _EQUALITIES and self.of_numbers.issuperset(operands)):
            self.of_numbers.add(moved)
        return moved


def _is_boolean(node: Node) -> bool:
    val = value(node)
    return val is not None and val.dtype is torch.bool
