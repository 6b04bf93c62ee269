"""Saved tensors in host memory: copied there and back on the current stream."""

from __future__ import annotations

import torch

from fxprec.ir.symbolic_host import Offload, Reload


def offload(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in host memory. On a GPU the copy is under way: nobody reads it but `reload`, on the same stream.

    torch keeps pinned memory that is freed for the next step, and hands it out once no copy uses it.
    """
    host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
    return host.copy_(x, non_blocking=x.is_cuda)


def reload(host: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    x = torch.empty_like(host, device=table.device)
    return x.copy_(host, non_blocking=x.is_cuda)


Offload.implement(offload)
Reload.implement(reload)
