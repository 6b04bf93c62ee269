"""Copies and kernel launches on a tensor's own device, whichever device is the current one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current device: Triton launches on the current device, with no look at the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_host(x: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Start a copy of a GPU's tensor to pinned memory; return the copy and the event after which it is whole.

    The event is recorded on the stream that copies. An event recorded on another device's stream is over at once.
    """
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu")
    arrived = torch.cuda.Event()
    with current(x.device):
        host.copy_(x, non_blocking=True)
        arrived.record(torch.cuda.current_stream(x.device))
    return host, arrived


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` on ``device``. A GPU reads it from pinned memory: a pageable copy waits for the stream."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
