"""Leave packed booleans to Inductor's loops, and draw random masks in the loop that packs them."""

from __future__ import annotations

from torch.fx import Graph, Node

from fxprec import compat
from fxprec.ir.operators import Trait, having
from fxprec.ir.symbolic import Draw, PackBits, UnpackBits
from fxprec.numerics.bits import split
from fxprec.passes.sites import emit_call, replace_node

_TESTS = having(Trait.TESTS_ABOVE) | having(Trait.TESTS_BELOW)


def lower_bits(graph: Graph) -> None:
    """Have Inductor pack booleans, and read them back, in the loops around."""
    if PackBits.nodes(graph) or UnpackBits.nodes(graph):
        compat.packs_in_loops(PackBits.target, UnpackBits.target, split)
    for _, pack in PackBits.among(PackBits.nodes(graph)):
        _draw_where_packed(pack.x)


def _draw_where_packed(mask: Node) -> None:
    """Draw a mask's random numbers where they are read, if nothing but the packed mask reads them.

    Else they would be written to memory, 32 times the size of the bits.
    """
    drawn = mask.args[0] if mask.target in _TESTS else None
    if not isinstance(drawn, Node):
        return
    draw = compat.draw_of(drawn)
    if draw is None or len(drawn.users) > 1 or len(mask.users) > 1:
        return
    compat.draws_where_read(Draw.target)
    with drawn.graph.inserting_before(drawn):
        replace_node(drawn, emit_call(drawn.graph, Draw(*draw), drawn))
