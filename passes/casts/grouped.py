"""Pad the groups of a grouped product's operands to whole blocks before they are rounded.

If a product sums over each group's tokens, no block may hold tokens of two groups: hardware scales each group's blocks,
and a Hadamard matrix cancels within one product only. So each group gets rows of zeros until it fills whole blocks. If
a format has one scale for the whole tensor, rows beyond the last group are left out of that scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from fxprec.ir.grouped import GroupedMm, PaddedEnds, PadGroups
from fxprec.passes.analysis.joint import is_backward, tensor_of
from fxprec.passes.casts.operands import Rounding
from fxprec.passes.sites import emit, emit_call

Roundings = list[tuple[int, Node, Rounding]]
_BITS = 128
"""Tensor cores read 16 bytes at once, so a group's codes begin at a multiple of them."""


@dataclass
class GroupedOperands:
    """Pads the operands of one graph's grouped products. Products that need the same padding share the result."""

    graph: Graph
    made: dict[tuple[Node, Node | None, int, bool], Node] = field(default_factory=dict)
    """(padded operand, its offsets, or None for offsets themselves, unit, whether in backward) -> the padded result."""

    def prepared(self, gemm: Node, roundings: Roundings) -> tuple[Roundings, list[Any]]:
        """Return the operands to round instead of those in ``roundings``, and the product's arguments.

        Call this for products in graph order.
        """
        args: list[Any] = list(gemm.args)
        offs = GroupedMm.of(gemm).offs
        is_sum = tensor_of(gemm).ndim == 3
        unit = max(max(how.unit, _BITS // how.fmt.bits) for _, _, how in roundings) if is_sum else 1
        with self.graph.inserting_before(gemm):
            if is_sum:
                args[2] = self._once(gemm, offs, None, unit)
            return [
                (at, self._padded(gemm, x, offs, unit, is_transposed=(at == 0) == is_sum), how)
                if is_sum or (how.fmt.tensor_scale and tensor_of(x).ndim == 2)
                else (at, x, how)
                for at, x, how in roundings
            ], args

    def _padded(self, gemm: Node, x: Node, offs: Node, unit: int, *, is_transposed: bool) -> Node:
        """Return an operand with padded groups of tokens. Tokens are its last dimension if ``is_transposed``."""
        if not is_transposed:
            return self._once(gemm, x, offs, unit)
        return self._transposed(self._once(gemm, self._transposed(x, gemm), offs, unit), gemm)

    def _once(self, gemm: Node, x: Node, offs: Node | None, unit: int) -> Node:
        key = x, offs, unit, is_backward(gemm)
        if key not in self.made:
            call = PaddedEnds(x, unit) if offs is None else PadGroups(x, offs, unit)
            self.made[key] = emit_call(self.graph, call, gemm)
        return self.made[key]

    def _transposed(self, x: Node, gemm: Node) -> Node:
        return emit(self.graph, torch.ops.aten.permute.default, (x, [1, 0]), gemm)
