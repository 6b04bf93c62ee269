"""Read private state of torch.distributed: the default group's store, and FSDP2's parameters and dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def process_group_store() -> tuple[int, int, Any] | None:
    """Return rank, world size and store of the default process group; None without a group or with one rank."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return dist.get_rank(), dist.get_world_size(), _get_default_store()


def sharded_parameters(module: FSDPModule) -> list[torch.Tensor]:
    """Return the parameters that FSDP2 gathers and reduces with an `FSDPModule`, in the order in which it sends them.

    The order differs from ``module.parameters()``: parameters of inner modules come before the module's own.
    """
    return [p.sharded_param for p in _sharded(module)]


def gathered_dtypes(module: FSDPModule) -> list[torch.dtype]:
    """Return the dtype in which FSDP2 gathers each of `sharded_parameters`; call this after the module has run."""
    return [p.param_dtype or p.orig_dtype for p in _sharded(module)]


def _sharded(module: FSDPModule) -> list[FSDPParam]:
    group = module._get_fsdp_state()._fsdp_param_group
    return [] if group is None else list(group.fsdp_params)
