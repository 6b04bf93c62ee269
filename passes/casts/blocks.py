"""Store a value in a block format and read it back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.fx import Graph, Node

from fxprec.ir.symbolic import Dequantize, Quantize, TensorScale
from fxprec.numerics.blocks import BlockFormat
from fxprec.passes.analysis.joint import is_dense, memory_order, tensor_of
from fxprec.passes.sites import emit, emit_call

aten = torch.ops.aten


def draw_seed(graph: Graph, before: Node) -> Node:
    """Draw the step's seed from torch's generator; all casts share it."""
    drawn = tensor_of(before).new_empty(1, dtype=torch.int32)
    options = {"dtype": torch.int32, "device": drawn.device}
    with graph.inserting_before(before):
        return emit(graph, aten.randint.low, (-(1 << 31), 1 << 31, [1]), before, kwargs=options, val=drawn)


def store_in_blocks(graph: Graph, q: Node, fmt: BlockFormat, seed: Node | None) -> None:
    """Replace a cast by a cast to blocks, rounded at random if ``seed``."""
    stored = _Stored.of(graph, Quantize.of(q).x, q, fmt, seed)
    for read, call in list(Dequantize.among(q.users)):
        if read.users:
            read.replace_all_uses_with(stored.read_at(read, call.dtype))
        graph.erase_node(read)
    graph.erase_node(q)


@dataclass(frozen=True)
class _Stored:
    """A value stored in blocks, its elements in memory order."""

    records: Node
    cast: Quantize
    val: torch.Tensor

    @classmethod
    def of(cls, graph: Graph, x: Node, q: Node, fmt: BlockFormat, seed: Node | None) -> Self:
        """Store ``x`` in front of ``q``."""
        val, order = tensor_of(x), _order(tensor_of(x))
        with graph.inserting_before(q):
            x = emit(graph, aten.permute.default, (x, order), q) if order else x
            whole = emit_call(graph, TensorScale(x, fmt.name), q) if fmt.tensor_scale else None
            cast = replace(Quantize.of(q), x=x, format=fmt.name, seed=seed, whole=whole)
            return cls(emit_call(graph, cast, q), cast, val)

    def read_at(self, read: Node, dtype: torch.dtype) -> Node:
        """Decode the value in front of ``read``, in ``dtype``."""
        graph, order = read.graph, _order(self.val)
        shape = [self.val.shape[d] for d in order] if order else list(self.val.shape)
        call = Dequantize.like(self.cast, q=self.records, dtype=dtype, elements=self.val.numel())
        with graph.inserting_before(read):
            shown = emit(graph, aten.view.default, (emit_call(graph, call, read), shape), read)
            if order:
                shown = emit(graph, aten.permute.default, (shown, [order.index(d) for d in range(len(order))]), read)
        return shown


def _order(val: torch.Tensor) -> list[int] | None:
    """Return the dimensions from slowest to fastest in memory; None if contiguous, or not dense."""
    return None if val.is_contiguous() or not is_dense(val) else memory_order(val)
