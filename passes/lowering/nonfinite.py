"""Let forward read the inf and NaN for which a tensor's format has no code.

This runs after the partition. Backward is then a graph of its own and reads the stored copy, so no wide tensor is
saved. On a CPU the kernel that rounds keeps inf and NaN; elsewhere a ``where`` is fused with the rounding.
"""

from __future__ import annotations

from torch.fx import Graph

from fxprec.ir.symbolic import Dequantize, KeepNonfinite, Quantize, is_in_blocks
from fxprec.numerics.formats import Format, parse


def keep_nonfinite(graph: Graph) -> None:
    """Insert ``keep_nonfinite`` after each dequantize of the forward graph that reads a copy stored in that graph."""
    for q, cast in Quantize.among(Quantize.nodes(graph)):
        if is_in_blocks(cast.format) or not loses_nonfinite(parse(cast.format)):
            continue
        for x in [x for x, read in Dequantize.among(q.users) if read.is_as_stored]:
            users = list(x.users)
            with graph.inserting_after(x):
                kept = KeepNonfinite(x, cast.x).insert(graph)
            kept.meta["val"] = x.meta["val"]
            for user in users:
                user.replace_input_with(x, kept)


def loses_nonfinite(fmt: Format) -> bool:
    """Return whether storing an inf or a NaN in this format turns it into a number."""
    return fmt.overflow == "saturate" or fmt.nan_code is None
