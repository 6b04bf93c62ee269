"""Multiply by scales beside casts that are one operator of Inductor's loops on a CPU.

A C++ compiler must assume that a loop's stores change the table. So a loop would recompute the power of two of a row
for each vector of elements. Instead one small loop per graph writes the powers of all rows to memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node

from fxprec.ir.symbolic import AS_STORED, Dequantize, InMemory, Quantize
from fxprec.passes.analysis.joint import behind_inputs, tensor_of
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.lowering.expand import insert
from fxprec.passes.sites import replace_node

aten = torch.ops.aten


@dataclass
class ScalesBeside:
    """The scales of one graph, and their inverses."""

    graph: Graph
    powers: dict[int, Node] = field(default_factory=dict)
    """By sign of the exponents: float32, one per row."""

    def scale(self, node: Node) -> Node:
        """Move a cast's scale to operators beside it; return the cast, which then leaves the scale as it is."""
        read = Dequantize.match(node)
        with self.graph.inserting_before(node):
            if read is None:
                cast = Quantize.of(node)
                node.args = replace(cast, x=self._times(cast.x, cast.table, cast.row, 1), row=AS_STORED).args
                return node
            wide = replace(read, row=AS_STORED, dtype=torch.float32).insert(self.graph)
            wide.meta = {**node.meta, "val": tensor_of(node).to(torch.float32)}
            x = self._as(self._times(wide, read.table, read.row, -1), read.dtype)
        replace_node(node, x)
        return wide

    def _times(self, x: Node, table: Node, row: int, sign: int) -> Node:
        power = self.graph.call_function(aten.select.int, (self._powers(table, sign), 0, row))
        wide = self._as(x, torch.float32)
        product = self.graph.call_function(aten.mul.Tensor, (wide, power))
        product.meta["val"] = tensor_of(wide)
        return product

    def _as(self, x: Node, dtype: torch.dtype) -> Node:
        if tensor_of(x).dtype == dtype:
            return x
        converted = self.graph.call_function(CONVERT, (x, dtype))
        converted.meta["val"] = tensor_of(x).to(dtype)
        return converted

    def _powers(self, table: Node, sign: int) -> Node:
        if sign not in self.powers:
            with self.graph.inserting_before(behind_inputs(self.graph)):
                self.powers[sign] = InMemory(insert(self.graph, _powers_of, table, sign)).insert(self.graph)
        return self.powers[sign]


def _powers_of(table: torch.Tensor, _: object, sign: int) -> torch.Tensor:
    """Return ``2.0**(sign * exponent)`` for every row by writing the bits of a float32."""
    return ((127 + table[:, 0] * sign) << 23).view(torch.float32)
