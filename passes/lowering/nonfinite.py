"""Let the forward pass see the inf and NaN that a tensor's format has no code for.

This is done once the graph is partitioned. Backward is a graph of its own by then and reads the stored copy, so no wide
tensor is saved. On a CPU the kernel that rounds keeps inf and NaN; elsewhere a ``where`` is fused with the rounding.
"""

from __future__ import annotations

from torch.fx import Graph

from fxprec.ir.symbolic import Dequantize, KeepNonfinite, Quantize, is_in_blocks
from fxprec.numerics.formats import Format, parse


def keep_nonfinite(graph: Graph) -> None:
    """Insert ``keep_nonfinite`` behind each tensor read back where it was just stored, in the forward graph."""
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
    """Say whether storing an inf or a NaN in this format makes it a number."""
    return fmt.overflow == "saturate" or fmt.nan_code is None
