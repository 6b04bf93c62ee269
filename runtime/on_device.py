"""Copy tensors and launch kernels on a tensor's own device, whichever device is the current one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fxprec.errors import ConfigError


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current device: Triton launches on the current device, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def refuse_capture(device: torch.device, what: str, why: str) -> None:
    """Raise `ConfigError` while the user captures a CUDA graph, whose replay leaves out the Python around the kernels.

    ``why`` names the cause and the way out. Inductor's own captures (``mode="reduce-overhead"``) contain only the code
    of a half, which never calls this function.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigError(f"{what} in the capture of a CUDA graph, {why}")


def to_host(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start to copy a GPU tensor to pinned memory; return the copy and the event after which it is complete.

    A tensor on another device is returned itself, without an event. The event is recorded on the stream that copies:
    an event on another device's stream would be complete at once.
    """
    if x.device.type != "cuda":
        return x, None
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu")
    arrived = torch.cuda.Event()
    with current(x.device):
        host.copy_(x, non_blocking=True)
        arrived.record(torch.cuda.current_stream(x.device))
    return host, arrived


def uploaded_for_good(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` on ``device``, complete for every stream: a tensor uploaded once may be read on another stream."""
    found = upload(x, device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return found


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` on ``device``. A GPU copies from pinned memory, because a pageable copy waits for the stream."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
