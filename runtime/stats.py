"""Statistics of compiled graphs: pushed as device tensors, read when they have arrived, never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MAX_PENDING = 256  # backward passes without a forward between them; then the oldest statistics are dropped
FIELDS = ("overflow_ratio", "underflow_ratio", "amax")


@dataclass(frozen=True, slots=True)
class SiteStats:
    """One site in one step. Ratios are shares of the tensor's elements; ``amax`` is before scaling."""

    site: int
    overflow_ratio: float
    underflow_ratio: float
    amax: float


@dataclass(slots=True)
class _Pending:
    sites: Sequence[int]
    host: torch.Tensor
    arrived: torch.cuda.Event | None


class StatsQueue:
    """Statistics on their way to the host, oldest first."""

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque(maxlen=MAX_PENDING)

    def __len__(self) -> int:
        return len(self._pending)

    def push(self, sites: Sequence[int], stats: torch.Tensor) -> None:
        """Take one graph's stats vector, (3 * sites,) float32, without waiting for the device."""
        if stats.device.type == "cpu":
            self._pending.append(_Pending(sites, stats, None))
            return
        host = torch.empty(stats.shape, dtype=stats.dtype, pin_memory=True)
        host.copy_(stats, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append(_Pending(sites, host, event))

    def poll(self, *, wait: bool = False) -> Iterator[SiteStats]:
        """Yield what has arrived; with ``wait``, everything that was pushed."""
        while self._pending:
            head = self._pending[0]
            if head.arrived is not None and not head.arrived.query():
                if not wait:
                    return
                head.arrived.synchronize()
            self._pending.popleft()
            rows = head.host.view(len(head.sites), len(FIELDS)).tolist()
            for site, row in zip(head.sites, rows, strict=True):
                yield SiteStats(site, *row)
