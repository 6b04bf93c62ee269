"""Try plans of a link in turn, a step each, and measure how long their steps take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import torch

from fxprec.runtime.aps.link_plan import LinkPlan

TRIALS = 7
"""Steps of each plan that is tried; the first step allocates its buffers and does not count."""
CLOSEST, AGAIN = 1.1, 4
"""Plans whose steps take at most 1.1 times as long as the fastest are tried once more, with 4 times as many steps."""


class Trial:
    """Plans in turn, a step each, and the time of their steps from the first bucket to that of the next step."""

    def __init__(self, plans: Sequence[LinkPlan], old: LinkPlan | None, *, is_last: bool = False) -> None:
        self.plans = plans
        self.is_last = is_last
        self._rounds = TRIALS * (AGAIN if is_last else 1)
        self.old = old
        """The plan in force before."""
        self._clocks: list[Clock] = []

    def next(self, now: Clock) -> LinkPlan | None:
        """Return the plan of the step that begins now, or None if all steps have been tried."""
        self._clocks.append(now)
        done = len(self._clocks) - 1
        return None if done == self._rounds * len(self.plans) else self.plans[done % len(self.plans)]

    def seconds(self) -> list[float]:
        """Return the mean of each plan's faster half of steps, because slower steps waited for something else."""
        steps = [after.after(before) for before, after in pairwise(self._clocks)]
        count = len(self.plans)
        return [fmean(sorted(steps[k::count][1:])[: self._rounds // 2]) for k in range(count)]


class Clock:
    """A moment: of the host, or of a GPU's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._seconds = time.perf_counter()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def after(self, earlier: Clock) -> float:
        """Return the seconds since another moment of the same device."""
        if self._event is None or earlier._event is None:
            return max(0.0, self._seconds - earlier._seconds)
        self._event.synchronize()
        return max(0.0, float(earlier._event.elapsed_time(self._event)) * 1e-3)
