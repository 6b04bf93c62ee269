"""The default process group's store, which has no public name."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def process_group_store() -> tuple[int, int, Any] | None:
    """Return rank, world size and store of the default process group; None without one, or of one rank."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return dist.get_rank(), dist.get_world_size(), _get_default_store()
