"""Lower packed booleans to ATen operators that Inductor fuses with the loops around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec import compat
from fxprec.ir.symbolic import PackBits, UnpackBits
from fxprec.numerics.bits import packed, packed_shape, unpacked
from fxprec.numerics.trace import drop_aliases
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.lowering.expand import inline
from fxprec.passes.sites import replace_node


def lower_bits(graph: Graph) -> None:
    """Replace the operators that pack booleans and read them back."""
    for node, pack in list(PackBits.among(PackBits.nodes(graph))):
        with graph.inserting_before(node):
            template = _packed(tuple(tensor_of(pack.x).shape))
            replace_node(node, inline(graph, template, (pack.x,), tensor_of(node).device))
    for node, read in list(UnpackBits.among(UnpackBits.nodes(graph))):
        with graph.inserting_before(node):
            template = _unpacked(tuple(read.shape))
            replace_node(node, inline(graph, template, (read.q,), tensor_of(node).device))


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
