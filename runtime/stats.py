"""Statistics of compiled graphs: pushed as device tensors, read when they have arrived, never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fxprec.ir.symbolic import HISTOGRAM_BINS
from fxprec.numerics.stats import WIDTH, finish
from fxprec.runtime import on_device

MAX_PENDING = 256  # backward passes without a forward between them; then the oldest statistics are dropped


@dataclass(frozen=True, slots=True)
class SiteStats:
    """One row of the table in one step. Ratios are shares of the tensor's elements; nothing carries a scale."""

    site: int
    """The row: the site's id, or that of a further cast of a site."""
    overflow_ratio: float
    underflow_ratio: float
    """NaN where codes were counted."""
    amax: float
    rms: float = 0.0
    nonzero_ratio: float = -1.0
    """-1 in steps that do not measure moments."""
    mean_ln: float = 0.0
    """Of ln|x| over the non-zero elements, as is ``std_ln``."""
    std_ln: float = 0.0
    counts: tuple[float, ...] = ()
    """Histogram of exponents, where one was taken."""

    @property
    def is_measured(self) -> bool:
        return self.nonzero_ratio >= 0


@dataclass(slots=True)
class _Pending:
    sites: Sequence[int]
    counted: Sequence[int]
    host: torch.Tensor
    arrived: torch.cuda.Event | None


class StatsQueue:
    """Statistics on their way to the host, oldest first."""

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque(maxlen=MAX_PENDING)
        self._is_muted = False

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def is_muted(self) -> bool:
        return self._is_muted

    def push(self, sites: Sequence[int], stats: torch.Tensor, counted: Sequence[int] = ()) -> None:
        """Take one graph's vector without waiting for the device.

        (10 * sites + 128 * counted,) float64: a row of counts per site, then the histograms of ``counted``.
        """
        if self._is_muted:
            return
        if stats.device.type == "cpu":
            self._pending.append(_Pending(sites, counted, stats, None))
            return
        self._pending.append(_Pending(sites, counted, *on_device.to_host(stats)))

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Take nothing for a while: what runs repeats what was seen."""
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False

    def poll(self, *, wait: bool = False) -> Iterator[SiteStats]:
        """Yield what has arrived; with ``wait``, everything that was pushed."""
        while self._pending:
            head = self._pending[0]
            if head.arrived is not None and not head.arrived.query():
                if not wait:
                    return
                head.arrived.synchronize()
            self._pending.popleft()
            yield from _rows(head)


def _rows(pending: _Pending) -> Iterator[SiteStats]:
    table = pending.host[: len(pending.sites) * WIDTH].view(len(pending.sites), WIDTH)
    found = finish(table)
    counts = _counts(pending) if any(row.nonzero_ratio >= 0 for row in found) else {}
    for site, row in zip(pending.sites, found, strict=True):
        yield SiteStats(site, *row, counts=counts.get(site, ()))


def _counts(pending: _Pending) -> dict[int, tuple[float, ...]]:
    values = pending.host[len(pending.sites) * WIDTH :].view(-1, 2 * HISTOGRAM_BINS).tolist()
    return dict(zip(pending.counted, map(tuple, values), strict=True))
