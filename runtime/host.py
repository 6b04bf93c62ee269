"""Keep saved tensors in host memory. On a GPU one further stream copies them there and back beside the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fxprec.kernels.host import Offload, Reload, WaitOffload, WaitReload
from fxprec.runtime.pinned import PinnedPool

_lanes: dict[torch.device, Lane] = {}


@dataclass(eq=False)
class Lane:
    """The copy stream of one device. One stream serves both directions, so each copy runs after all earlier ones."""

    device: torch.device
    stream: torch.cuda.Stream
    pool: PinnedPool
    arriving: dict[int, torch.cuda.Event] = field(default_factory=dict)
    """The event of each copy back to the device that is under way, by the address of the tensor that it fills."""

    @classmethod
    def of(cls, device: torch.device) -> Lane:
        """Return the lane of a device, the same for all threads."""
        if device not in _lanes:
            stream = torch.cuda.Stream(device)
            _lanes.setdefault(device, cls(device, stream, PinnedPool(device, stream)))
        return _lanes[device]

    def send(self, x: torch.Tensor) -> torch.Tensor:
        """Start to copy ``x`` after the kernels enqueued so far. Call `wait_sent` before ``x`` is freed."""
        host = self.pool.lend(x)
        self.pool.block_of(host).copied = self._copy(host, x)
        return host

    def wait_sent(self, host: torch.Tensor) -> None:
        """Make later kernels wait for the copy into ``host``, because they may overwrite the copied tensor's memory."""
        copied = self.pool.block_of(host).copied
        assert copied is not None, "what is waited for was sent"
        torch.cuda.current_stream(self.device).wait_event(copied)

    def fetch(self, host: torch.Tensor) -> torch.Tensor:
        """Start to copy ``host`` back after the kernels enqueued so far, which may read the memory that it fills."""
        x = torch.empty_like(host, device=self.device)
        self.arriving[x.data_ptr()] = self._copy(x, host)
        return x

    def wait_fetched(self, x: torch.Tensor) -> None:
        """Make later kernels, which read ``x``, wait for its copy."""
        torch.cuda.current_stream(self.device).wait_event(self.arriving.pop(x.data_ptr()))

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
        event: torch.cuda.Event = self.stream.record_event()
        return event


def offload(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in host memory. On a GPU the copy is under way; call `wait_offload` before ``x`` is freed."""
    if x.is_cuda:
        return Lane.of(x.device).send(x)
    return torch.empty_like(x, device="cpu").copy_(x)


def wait_offload(host: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return ``host``. On a GPU, kernels enqueued from now on wait for the copy of ``x`` into ``host``."""
    if x.is_cuda:
        Lane.of(x.device).wait_sent(host)
    return host


def reload(host: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return ``host`` on the table's device. On a GPU the copy is under way; call `wait_reload` before reading it."""
    if table.is_cuda:
        return Lane.of(table.device).fetch(host)
    return torch.empty_like(host, device=table.device).copy_(host)


def wait_reload(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``. On a GPU, kernels enqueued from now on wait for the copy into ``x``."""
    if x.is_cuda:
        Lane.of(x.device).wait_fetched(x)
    return x


Offload.implement(offload)
WaitOffload.implement(wait_offload)
Reload.implement(reload)
WaitReload.implement(wait_reload)
