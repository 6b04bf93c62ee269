"""What torch's own ``activation_memory_budget`` comes to, once the graph is partitioned."""

from __future__ import annotations

from torch.fx import Graph

from fxprec.ir.symbolic import Quantize
from fxprec.passes.analysis.operators import module_of
from fxprec.passes.analysis.saved_bytes import largest_saved
from fxprec.passes.notice import Notice, readable

SMALL = 64 * 1024  # bytes above the budget that are not worth a word: random seeds, statistics, one more small tensor


def over_ratio(budget: float, read: int, saved: int, forward: Graph, num_outputs: int) -> Notice | None:
    """Say what holds memory where more is saved than ``budget`` (0 to 1) of the ``read`` bytes that backward reads."""
    largest = largest_saved(forward, num_outputs)
    if saved <= budget * read + SMALL or largest is None:
        return None
    node, size = largest
    cast = Quantize.match(node)
    made = node if cast is None else cast.x
    module = module_of(made)
    where = f"{made.name} ({module})" if module else made.name
    return Notice(
        f"activation_memory_budget={budget:g}",
        f"{readable(saved)} are saved for backward, {saved / read:.2f} of what it reads: torch's partitioner finds no "
        f"less, or has to save it; the largest is {where}, {readable(size)}. torch.utils.checkpoint around a module "
        "saves what the module starts from and nothing else of it",
    )
