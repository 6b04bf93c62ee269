"""Lower packed booleans to ATen operators that Inductor fuses with the loops around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec import compat
from fxprec.ir.operators import Trait, having
from fxprec.ir.symbolic import PackBits, UnpackBits
from fxprec.numerics.bits import IN_A_BYTE, joined, packed, packed_shape, unpacked
from fxprec.numerics.trace import drop_aliases
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.lowering.expand import copied_in, inline
from fxprec.passes.sites import emit_on, replace_node

_TESTS = having(Trait.TESTS_ABOVE) | having(Trait.TESTS_BELOW)


def lower_bits(graph: Graph) -> None:
    """Replace the operators that pack booleans and read them back."""
    for node, pack in PackBits.among(PackBits.nodes(graph)):
        if not _draw_packed(node, pack.x):
            with graph.inserting_before(node):
                template = _packed(tuple(tensor_of(pack.x).shape))
                replace_node(node, inline(graph, template, (pack.x,), tensor_of(node).device))
    for node, read in UnpackBits.among(UnpackBits.nodes(graph)):
        with graph.inserting_before(node):
            template = _unpacked(tuple(read.shape))
            replace_node(node, inline(graph, template, (read.q,), tensor_of(node).device))


def _draw_packed(node: Node, mask: Node) -> bool:
    """Replace a packed mask by eight that are drawn at once, if random numbers were drawn for the mask alone.

    One loop then draws and packs. Else the numbers would be written to memory, 32 times the size of the bits.
    """
    drawn = mask.args[0] if mask.target in _TESTS else None
    if not isinstance(drawn, Node) or not compat.is_drawn(drawn) or len(drawn.users) > 1 or len(mask.users) > 1:
        return False
    graph = node.graph
    with graph.inserting_before(node):
        pieces = compat.drawn_in_slices(drawn, tuple(tensor_of(node).shape), IN_A_BYTE)
        compared = [emit_on(graph, mask, piece) for piece in pieces]
        joined = copied_in(graph, _joined(), tuple(compared), tensor_of(node).device)
    replace_node(node, joined)
    for gone in (mask, drawn):
        graph.erase_node(gone)
    return True


@lru_cache(maxsize=1)
def _joined() -> GraphModule:
    pieces = [torch.zeros(2, 3, dtype=torch.bool, device="cpu") for _ in range(IN_A_BYTE)]
    traced = make_fx(lambda *pieces: joined(pieces), decomposition_table=compat.decompositions())(*pieces)
    drop_aliases(traced.graph)
    return traced


@lru_cache(maxsize=256)
def _packed(shape: tuple[int, ...]) -> GraphModule:
    return _traced(packed, shape, torch.bool)


@lru_cache(maxsize=256)
def _unpacked(shape: tuple[int, ...]) -> GraphModule:
    return _traced(lambda q: unpacked(q, shape), tuple(packed_shape(shape)), torch.uint8)


def _traced(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> GraphModule:
    example = torch.empty(shape, dtype=dtype, device="cpu")  # never written, so it takes no memory
    traced = make_fx(function, decomposition_table=compat.decompositions(), tracing_mode="fake")(example)
    drop_aliases(traced.graph)
    return traced
