"""Store a value in a block format and read it back, with a ReLU's mask beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.fx import Graph, Node

from fxprec.ir.symbolic import Dequantize, Quantize, TensorScale
from fxprec.numerics.blocks import SIGNS, WHOLE_BITS, BlockFormat
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.analysis.signs import readers_testing_above_0
from fxprec.passes.sites import emit, emit_call

aten = torch.ops.aten


def draw_seed(graph: Graph, before: Node) -> Node:
    """Draw the step's seed from torch's generator; all casts share it."""
    drawn = tensor_of(before).new_empty(1, dtype=torch.int32)
    options = {"dtype": torch.int32, "device": drawn.device}
    with graph.inserting_before(before):
        return emit(graph, aten.randint.low, (-(1 << 31), 1 << 31, [1]), before, kwargs=options, val=drawn)


def store_in_blocks(graph: Graph, q: Node, fmt: BlockFormat, seed: Node | None) -> bool:
    """Replace a cast by a cast to blocks, rounded at random if ``seed``; return whether more than its mask is read."""
    x, reads = Quantize.of(q).x, list(Dequantize.among(q.users))
    if fmt.bits < WHOLE_BITS:
        _store_mask(graph, q, [read for read, _ in reads])
    reads_whole = [(read, call.dtype) for read, call in reads if read.users]
    if reads_whole:
        stored = _Stored.of(graph, x, q, fmt, seed)
        for read, dtype in reads_whole:
            read.replace_all_uses_with(stored.read_at(read, dtype))
    for read, _ in reads:
        graph.erase_node(read)
    graph.erase_node(q)
    return bool(reads_whole)


def _store_mask(graph: Graph, q: Node, reads: list[Node]) -> None:
    """Store an exact mask, one bit an element, for the nodes that test whether a copy is above 0."""
    found = [(read, alias, user) for read in reads for alias, user in readers_testing_above_0(read)]
    if not found:
        return
    with graph.inserting_before(q):
        mask = emit(graph, aten.gt.Scalar, (Quantize.of(q).x, 0), q)
    stored = _Stored.of(graph, mask, q, SIGNS, None)
    for read in dict.fromkeys(read for read, _, _ in found):
        shown = stored.read_at(read, torch.bfloat16)
        for alias, user in readers_testing_above_0(read):
            user.replace_input_with(alias, shown)
            while alias is not read and not alias.users:
                source = alias.all_input_nodes[0]
                graph.erase_node(alias)
                alias = source


@dataclass(frozen=True)
class _Stored:
    """A value stored in blocks, its elements in memory order."""

    records: Node
    cast: Quantize
    val: torch.Tensor

    @classmethod
    def of(cls, graph: Graph, x: Node, q: Node, fmt: BlockFormat, seed: Node | None) -> Self:
        """Store ``x`` in front of ``q``."""
        val, order = tensor_of(x), _memory_order(tensor_of(x))
        with graph.inserting_before(q):
            x = emit(graph, aten.permute.default, (x, order), q) if order else x
            whole = emit_call(graph, TensorScale(x, fmt.name), q) if fmt.tensor_scale else None
            cast = replace(Quantize.of(q), x=x, format=fmt.name, seed=seed, whole=whole)
            return cls(emit_call(graph, cast, q), cast, val)

    def read_at(self, read: Node, dtype: torch.dtype) -> Node:
        """Decode the value in front of ``read``, in ``dtype``."""
        graph, order = read.graph, _memory_order(self.val)
        shape = [self.val.shape[d] for d in order] if order else list(self.val.shape)
        call = Dequantize.like(self.cast, q=self.records, dtype=dtype, elements=self.val.numel())
        with graph.inserting_before(read):
            shown = emit(graph, aten.view.default, (emit_call(graph, call, read), shape), read)
            if order:
                shown = emit(graph, aten.permute.default, (shown, [order.index(d) for d in range(len(order))]), read)
        return shown


def _memory_order(val: torch.Tensor) -> list[int] | None:
    """Return the dimensions from slowest to fastest in memory; None if contiguous, or not dense."""
    if val.is_contiguous() or not aten.is_non_overlapping_and_dense(val):
        return None
    return sorted(range(val.ndim), key=lambda d: -val.stride()[d])
