"""Let the forward pass see the inf and NaN that a tensor's format has no code for.

Done once the graph is partitioned: backward, a graph of its own, reads what is stored, so nothing wide is saved for
this. On a CPU the kernel that rounds does it on the way; elsewhere it is a ``where`` fused with the rounding.
"""

from __future__ import annotations

from torch.fx import Graph

from fxprec.ir import symbolic
from fxprec.numerics.formats import Format, parse


def keep_nonfinite(graph: Graph) -> None:
    """Insert ``keep_nonfinite`` behind each tensor read back where it was just stored, in the forward graph."""
    for q in graph.find_nodes(op="call_function", target=symbolic.QUANTIZE):
        x, _, _, name, _ = q.args
        if not loses_nonfinite(parse(name)):
            continue
        for read in [u for u in q.users if u.target is symbolic.DEQUANTIZE and u.args[2] == symbolic.AS_STORED]:
            users = list(read.users)
            with graph.inserting_after(read):
                kept = graph.call_function(symbolic.KEEP_NONFINITE, (read, x))
            kept.meta["val"] = read.meta["val"]
            for user in users:
                user.replace_input_with(read, kept)


def loses_nonfinite(fmt: Format) -> bool:
    """Say whether storing an inf or a NaN in this format makes it a number."""
    return fmt.overflow == "saturate" or fmt.nan_code is None
