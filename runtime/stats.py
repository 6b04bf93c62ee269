"""Queue the statistics of compiled graphs: copy them from the device to the host and hand them out by step.

Statistics are acted on a fixed number of steps later, so the time at which a copy arrives never changes a number. A GPU
runs behind the host, so the statistics of its step ``n`` are acted on two steps later. By then they have nearly always
arrived; else the host waits.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, NamedTuple

import torch

from fxprec.ir.symbolic import HISTOGRAM_BINS
from fxprec.numerics.stats import WIDTH, Statistics, finished_columns
from fxprec.runtime import on_device

NO_CAPTURE = (
    "whose scales would stay as they are, with no statistics read; leave out torch.cuda.graph and "
    "make_graphed_callables, and compile with mode='reduce-overhead'"
)
STEPS_LATE = {"cpu": 1, "cuda": 2}
"""Number of steps by device type: statistics of step ``n`` are acted on at the start of step ``n`` plus this number."""
MAX_PENDING = 256  # pushes, one per backward pass, without a step that takes them; beyond, the oldest are dropped


_NONZERO = Statistics._fields.index("nonzero_ratio")


def steps_late(device: torch.device) -> int:
    """Return the number of steps after which statistics of ``device`` are acted on."""
    return STEPS_LATE.get(device.type, 1)


class SiteStats(NamedTuple):
    """Statistics of one row of the table in one step, without scales. Ratios are shares of the tensor's elements."""

    site: int
    """The row: the site's id, or the row of a further cast of a site."""
    overflow_ratio: float
    underflow_ratio: float
    """NaN if statistics were counted from codes, which do not show what underflowed."""
    amax: float
    rms: float = 0.0
    nonzero_ratio: float = -1.0
    """-1 in steps that do not measure moments."""
    mean_ln: float = 0.0
    """Mean of ln|x| over the non-zero elements; ``std_ln`` is their standard deviation."""
    std_ln: float = 0.0
    counts: tuple[float, ...] = ()
    """Histogram of exponents, where one was taken."""

    @property
    def is_measured(self) -> bool:
        """Return whether the step measured moments."""
        return self.nonzero_ratio >= 0


@dataclass(slots=True)
class _Push:
    """One vector of counts on its way to the host, or statistics loaded from a saved state."""

    sites: Sequence[int]
    counted: Sequence[int]
    host: torch.Tensor
    arrived: torch.cuda.Event | None
    found: tuple[SiteStats, ...] | None = None

    @property
    def has_arrived(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def read(self) -> tuple[SiteStats, ...]:
        """Return the statistics; waits for the device."""
        if self.found is None:
            if self.arrived is not None:
                self.arrived.synchronize()
            self.found = tuple(_rows(self))
        return self.found


@dataclass(slots=True)
class _Step:
    """The pushes of one step. The last step is open until the next one begins."""

    number: int | None = None
    pushes: list[_Push] = field(default_factory=list)

    @property
    def has_arrived(self) -> bool:
        return all(push.has_arrived for push in self.pushes)

    def read(self) -> list[SiteStats]:
        return [stats for push in self.pushes for stats in push.read()]


class StatsQueue:
    """Statistics on their way to the host by step, oldest first. Steps decide which are taken, not arrival.

    Threads that share a compiled model push at any time; one of them takes.
    """

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self._lock = threading.Lock()
        """Locked while the steps or their pushes change or are listed, never while waiting for a device."""
        self._muted = 0  # open contexts of `muted`

    def __len__(self) -> int:
        """Return the number of pending vectors."""
        return len(self._waiting())

    @property
    def is_muted(self) -> bool:
        """Return whether pushes are dropped (`muted`)."""
        return self._muted > 0

    def push(self, sites: Sequence[int], stats: torch.Tensor, counted: Sequence[int] = ()) -> None:
        """Queue one graph's vector without waiting for the device.

        ``stats``: (10 * sites + 128 * counted,) float64, a row of counts per site, then the histograms of ``counted``.
        """
        if self.is_muted:
            return
        on_device.refuse_capture(stats.device, "a backward pass compiled with fxprec runs", NO_CAPTURE)
        push = _Push(sites, counted, *on_device.to_host(stats))
        with self._lock:
            if not self._steps or self._steps[-1].number is not None:
                self._steps.append(_Step())
            self._steps[-1].pushes.append(push)
            if sum(len(step.pushes) for step in self._steps) > MAX_PENDING:
                self._steps[0].pushes.pop(0)
                if not self._steps[0].pushes:
                    self._steps.popleft()

    def close(self, step: int) -> None:
        """Close the open step: give the number ``step`` to everything pushed since the last close."""
        with self._lock:
            if self._steps and self._steps[-1].number is None:
                self._steps[-1].number = step

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Drop pushes within the context, whose code repeats a computation that was already counted."""
        with self._lock:
            self._muted += 1
        try:
            yield
        finally:
            with self._lock:
                self._muted -= 1

    def take(self, *, keep: int = 0, wait: bool = True) -> Iterator[tuple[int | None, list[SiteStats]]]:
        """Remove and yield (step, statistics) of all steps but the ``keep`` newest; an open step's number is None.

        Waits for the device. Without ``wait``, stop at the first step that has not arrived.
        """
        while (step := self._next(keep, wait=wait)) is not None:
            yield step.number, step.read()

    def _next(self, keep: int, *, wait: bool) -> _Step | None:
        with self._lock:
            if len(self._steps) > keep and (wait or self._steps[0].has_arrived):
                return self._steps.popleft()
        return None

    def _waiting(self) -> list[_Push]:
        with self._lock:
            return [push for step in self._steps for push in step.pushes]

    def peek(self, *, wait: bool = True) -> Iterator[SiteStats]:
        """Yield pending statistics, oldest first, and keep them; without ``wait`` only those that have arrived."""
        for push in self._waiting():
            if wait or push.has_arrived:
                yield from push.read()

    def forget(self) -> None:
        """Drop all pending statistics."""
        with self._lock:
            self._steps.clear()

    def state(self) -> list[dict[str, Any]]:
        """Return pending statistics as plain JSON data; waits for the device."""
        with self._lock:
            steps = [replace(step, pushes=[*step.pushes]) for step in self._steps]
        return [{"step": step.number, "statistics": [to_plain(stats) for stats in step.read()]} for step in steps]

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Replace the pending statistics by a result of `state`."""
        steps = []
        for saved in state:
            found = tuple(from_plain(stats) for stats in saved["statistics"])
            nothing = torch.empty(0, dtype=torch.int32, device="cpu")
            steps.append(_Step(saved["step"], [_Push((), (), nothing, None, found)]))
        with self._lock:
            self._steps = deque(steps)


def to_plain(stats: SiteStats) -> dict[str, object]:
    """Return statistics as plain JSON data. Non-finite numbers become strings."""
    found = {**stats._asdict(), "counts": list(stats.counts)}
    return {key: str(x) if isinstance(x, float) and not math.isfinite(x) else x for key, x in found.items()}


def from_plain(stats: Mapping[str, Any]) -> SiteStats:
    """Return the statistics that `to_plain` returned as data."""
    numbers: dict[str, Any] = {key: float(x) if isinstance(x, str) else x for key, x in stats.items()}
    return SiteStats(**{**numbers, "counts": tuple(stats["counts"])})


def _rows(pending: _Push) -> Iterator[SiteStats]:
    columns = finished_columns(pending.host[: len(pending.sites) * WIDTH].view(len(pending.sites), WIDTH))
    counts = _counts(pending) if any(share >= 0 for share in columns[_NONZERO]) else {}
    counted = map(counts.get, pending.sites, repeat(())) if counts else repeat((), len(pending.sites))
    return map(SiteStats._make, zip(pending.sites, *columns, counted, strict=True))


def _counts(pending: _Push) -> dict[int, tuple[float, ...]]:
    values = pending.host[len(pending.sites) * WIDTH :].view(-1, 2 * HISTOGRAM_BINS).tolist()
    return dict(zip(pending.counted, map(tuple, values), strict=True))
