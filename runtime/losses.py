"""Find jumps among the losses of a run. Each loss is read a fixed number of steps after it is given."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from fxprec.errors import ConfigError
from fxprec.runtime import on_device
from fxprec.runtime.controller import Controller
from fxprec.runtime.nonfinite import Departure

WINDOW = 50  # earlier losses that a loss is compared with
LEAST = 10  # earlier losses that must be known before a finite loss can be a jump
SPREADS = 10.0  # median absolute deviations above the median, 7 standard deviations of a normal distribution
RISE = 0.5  # share of the median by which any loss may rise, even one that hardly varies


@dataclass(frozen=True)
class Jump:
    """A loss far above the losses before it, or not finite."""

    step: int
    loss: float
    usual: float
    """Median of the losses before it."""

    def __str__(self) -> str:
        what = f"rose to {self.loss:.4g}" if math.isfinite(self.loss) else f"became {self.loss}"
        return f"the loss {what} from about {self.usual:.4g} at step {self.step}"


class LossWatch:
    """Losses that wait to be read, oldest first, and the last `WINDOW` losses that were no jump."""

    def __init__(self) -> None:
        self._pending: deque[tuple[int, torch.Tensor | float, torch.cuda.Event | None]] = deque(maxlen=256)
        self._past: deque[float] = deque(maxlen=WINDOW)
        self._is_high = False

    def note(self, step: int, loss: object) -> None:
        """Queue a step's loss, a tensor of one element or a number. Raises `ConfigError` for anything else."""
        if self._pending and step < self._pending[-1][0]:  # a state of an earlier step was loaded
            self._pending.clear()
            self._is_high = False
        if isinstance(loss, int | float):
            self._pending.append((step, float(loss), None))
            return
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shown = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"loss has {shown}; give a tensor of one element or a number")
        value = loss.detach()
        if not value.is_cuda:
            self._pending.append((step, float(value), None))
            return
        self._pending.append((step, *on_device.to_host(value)))

    def jumps(self, *, before: int) -> Iterator[Jump]:
        """Yield jumps of steps before ``before``, only the first of several in a row; waits for the device."""
        while self._pending and self._pending[0][0] < before:
            step, loss, arrived = self._pending.popleft()
            if arrived is not None:
                arrived.synchronize()
            value = float(loss)
            usual = median(self._past) if len(self._past) >= LEAST else math.inf
            was_high, self._is_high = self._is_high, self._jumps(value, usual)
            if not self._is_high:
                self._past.append(value)
            elif not was_high:
                yield Jump(step, value, usual)

    def _jumps(self, loss: float, usual: float) -> bool:
        if not math.isfinite(loss):
            return len(self._past) > 0
        if not math.isfinite(usual):
            return False
        spread = median(abs(x - usual) for x in self._past)
        return loss > usual + max(SPREADS * spread, RISE * abs(usual))


def first_that_moved(jump: Jump, controllers: Sequence[Controller]) -> tuple[Controller, Departure] | None:
    """Return the first departure over all graphs, or None.

    Departures are ordered by step, then by execution: forward graphs, then backward from the last graph on.
    """
    found = []
    for i, controller in enumerate(controllers):
        if controller.nonfinite is None:
            continue
        departure = controller.nonfinite.first_moved(jump.step, controller.site_of, str(jump))
        if departure is not None:
            in_backward, place = departure.site.order
            found.append(((departure.step, in_backward, -i if in_backward else i, place), controller, departure))
    if not found:
        return None
    _, controller, departure = min(found, key=lambda f: f[0])
    return controller, departure
