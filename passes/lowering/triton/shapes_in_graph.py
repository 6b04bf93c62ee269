"""Find or make the nodes of dynamic sizes, which kernels are launched with."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from fxprec.passes.lowering.triton.kernel import Unprintable
from fxprec.passes.lowering.triton.sizes import Size, shape_of, size_of, strides_of

aten = torch.ops.aten


@dataclass
class SizeNodes:
    """Finds or makes the node of a size. Nodes are made at the graph's insertion point."""

    graph: Graph
    found: dict[Size, Node] = field(default_factory=dict)
    tensors: list[Node] = field(default_factory=list)

    def learn(self, node: Node) -> None:
        """Note the sizes that ``node`` gives. It must precede all nodes that use them."""
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            self.found.setdefault(size_of(val), node)
        elif isinstance(val, torch.Tensor):
            self.tensors.append(node)

    def of(self, size: Size, near: list[Node]) -> int | Node:
        """Return the size as an int or a node; ``near`` are tensors that may have it. Raises `Unprintable`."""
        if isinstance(size, int | sympy.Integer):
            return int(size)
        if size in self.found:
            return self.found[size]
        for tensor in (*near, *self.tensors):
            val: torch.Tensor = tensor.meta["val"]
            for target, sizes, values in (
                (aten.sym_size.int, shape_of(val), val.shape),
                (aten.sym_stride.int, strides_of(val), val.stride()),
            ):
                if size in sizes:
                    dim = sizes.index(size)
                    return self._call(target, (tensor, dim), values[dim])
        if isinstance(size, sympy.Mul):
            first, *rest = (self.of(part, near) for part in size.args)
            for part in rest:
                first = self._call(operator.mul, (first, part), _value(first) * _value(part))
            return first
        raise Unprintable(f"no tensor has the size {size}")

    def programs(self, size: Size, per_program: int, near: list[Node]) -> int | Node:
        """Return the number of programs for ``size`` elements, at least 1."""
        found = self.of(size, near)
        if isinstance(found, int):
            return max(1, -(-found // per_program))
        more = self._call(operator.add, (found, per_program - 1), _value(found) + (per_program - 1))
        return self._call(operator.floordiv, (more, per_program), _value(more) // per_program)

    def _call(self, target: Callable[..., object], args: tuple[Argument, ...], val: object) -> Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = val
        return node


def _value(item: int | Node) -> Any:
    return item if isinstance(item, int) else item.meta["val"]
