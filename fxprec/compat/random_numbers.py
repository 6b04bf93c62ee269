"""Random numbers as Inductor's joint-graph passes draw them, each by a seed and its place in the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch.fx import Node

_PRIMS = torch.ops.prims


def draw_of(node: Node) -> tuple[Sequence[int], Node] | None:
    """Return the size and the seed of uniform random numbers that a node draws from one of Inductor's seeds."""
    target = getattr(_PRIMS, "inductor_random", None)
    if target is None or node.target is not target.default or node.kwargs:
        return None
    size, seed, mode = node.args
    assert isinstance(seed, Node), node.format_node()
    return (cast(Sequence[int], size), seed) if mode == "rand" else None


def draws_where_read(draw: object) -> None:
    """Make Inductor compute ``draw(size, seed)``, the numbers of its ``inductor_random``, in the loop that reads them.

    Inductor writes its own to memory first.
    """
    from torch._inductor import ir, lowering

    stored = lowering.lowerings[_PRIMS.inductor_random.default]

    def drawn(size: object, seed: object) -> object:
        loop = stored(size, seed, "rand").data.data.data  # of a buffer that nothing reads, which Inductor leaves out
        return ir.TensorBox.create(loop)

    if draw not in lowering.lowerings:
        lowering.register_lowering(draw, type_promotion_kind=None)(drawn)
