"""Cast a tensor in the layout in which GEMMs multiply it, so that GEMMs can multiply its codes.

Attention's result and its gradients reach a linear layer through permutes and copies: (batch, heads, tokens, size) in
another memory order. A cast is elementwise, so it can be moved behind the permutes and copies, where the codes form a
matrix. Other readers of the tensor still see its old shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from fxprec.ir.symbolic import Dequantize, KeepNonfinite, Quantize
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.coded_gemms import MATMULS, PURE_VIEWS, layout_of
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.base import Work
from fxprec.passes.sites import emit, emit_on, read_of

aten = torch.ops.aten
_TRANSPOSES = frozenset({aten.transpose.int, aten.t.default})  # each is its own inverse


def cast_as_multiplied(work: Work) -> None:
    """Move a cast behind the views and copies before a GEMM, if the GEMM could not multiply its codes otherwise."""
    for q, cast in Quantize.among(Quantize.nodes(work.joint.graph)):
        chains = list(_chains(read_of(q)))
        if not chains or any(layout_of(q, chain[-1]) is not None for chain in chains):
            continue
        steps = next(filter(None, map(_to_a_matrix, chains)), ())
        if steps:
            work.book.values[cast.row] = _CastMove(work.joint.graph, q, steps).move()


def _chains(x: Node, chain: tuple[Node, ...] = ()) -> Iterator[tuple[Node, ...]]:
    """Yield the chain of views and copies between ``x`` and each matrix product; the product's operand is last."""
    for user in x.users:
        if user.target in MATMULS and chain:
            yield chain
        elif (user.target in PURE_VIEWS or user.target in ops.COPIES) and len(user.all_input_nodes) == 1:
            yield from _chains(user, (*chain, user))


def _to_a_matrix(chain: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the shortest prefix of a chain behind which the codes have a layout that the GEMM reads, or ``()``."""
    for i, node in enumerate(chain):
        rest = {step.target for step in chain[i + 1 :]}
        if layout_of(node, chain[-1]) is not None and rest <= PURE_VIEWS and all(map(_is_known, chain[: i + 1])):
            return chain[: i + 1]
    return ()


def _is_known(step: Node) -> bool:
    """Return whether the shape of a step's operand is static."""
    return all(isinstance(size, int) for size in tensor_of(step.all_input_nodes[0]).shape)


@dataclass
class _CastMove:
    graph: Graph
    q: Node
    steps: tuple[Node, ...]

    def move(self) -> Node:
        """Move the cast and its dequantize behind the steps; return the node that is cast now."""
        read, value = read_of(self.q), Quantize.of(self.q).x
        others = [user for user in read.users if user is not self.steps[0]]
        with self.graph.inserting_before(self.q):
            for step in self.steps:
                value = emit_on(self.graph, step, value, val=step.meta["val"])
        shapes = [tensor_of(step.all_input_nodes[0]).shape for step in self.steps]
        self._cast(value)
        self.steps[-1].replace_all_uses_with(read)
        if others:
            with self.graph.inserting_before(min(others)):
                shown = self._shown(read, shapes)
            for user in others:
                if user not in self.steps:
                    user.replace_input_with(read, shown)
        for step in reversed(self.steps):
            if not step.users:
                self.graph.erase_node(step)
        return value

    def _cast(self, value: Node) -> None:
        val = tensor_of(value)
        self.q.args = replace(Quantize.of(self.q), x=value).args
        self.q.meta["val"] = torch.empty_like(val, dtype=tensor_of(self.q).dtype)
        for x, _ in Dequantize.among(self.q.users):
            x.meta["val"] = val
            for guard, call in KeepNonfinite.among(x.users):
                guard.args, guard.meta["val"] = replace(call, x=value).args, val

    def _shown(self, read: Node, shapes: list[torch.Size]) -> Node:
        """Undo the steps on the decoded value; ``shapes`` are the shapes of the steps' operands."""
        for step, shape in zip(reversed(self.steps), reversed(shapes), strict=True):
            if step.target is aten.permute.default:
                order: Any = step.args[1]
                dims = [d % len(shape) for d in order]
                read = emit(self.graph, step.target, (read, [dims.index(d) for d in range(len(dims))]), read)
            elif step.target in _TRANSPOSES:
                read = emit_on(self.graph, step, read, like=read)
            elif step.target not in ops.COPIES:
                read = emit(self.graph, aten.reshape.default, (read, list(shape)), read)
        return read
