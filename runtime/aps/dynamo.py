"""DistributedDataParallel under torch.compile: keep the graph whole for fxprec."""

from __future__ import annotations

import warnings

import torch._dynamo

from fxprec.errors import FxprecWarning


def keep_graphs_whole() -> bool:
    """Switch off Dynamo's DDP optimizer, with an `FxprecWarning`; return whether it was on.

    It cuts a model's graph at DDP's buckets, and the fxprec backend groups operators over the whole graph: each piece
    would be planned for itself. Call it before the first forward pass. Plain backends do not need it.
    """
    config = torch._dynamo.config
    if not config.optimize_ddp:
        return False
    config.optimize_ddp = False
    warnings.warn(
        "Dynamo's DDP optimizer is off: it cuts graphs at DDP's buckets, and fxprec plans whole graphs; gradients now "
        "travel after the compiled backward pass; set torch._dynamo.config.optimize_ddp = True to have it back",
        FxprecWarning,
        stacklevel=2,
    )
    return True
